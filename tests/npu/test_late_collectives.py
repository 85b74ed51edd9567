"""Collectives with streams=adversarial: outputs appear when somebody waited, and inputs must stay until then."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_ranks

N = 1024


def _outputs(rank, device, wait):
    """What a kernel reads of each kind of output, with and without a wait before it."""
    card, other, seen = device.torch_device, 1 - rank, []

    def look(work, tensor):
        if wait:
            work.wait()
        seen.append((tensor * 1)[0].item())
        work.wait()  # a second time, or too late
        device.synchronize()

    mine = torch.full((N,), float(rank + 1), device=card)
    reduced = mine.clone()
    look(dist.all_reduce(reduced, async_op=True), reduced)
    named = mine.clone()
    look(dist.broadcast(named, src=1, async_op=True), named)
    exchanged = torch.zeros(N, device=card)
    look(dist.all_to_all_single(exchanged, mine, async_op=True), exchanged[N // 2 * other :])
    gathered = torch.zeros(2 * N, device=card)
    look(dist.all_gather_into_tensor(gathered, mine, async_op=True), gathered[N * other :])
    scattered = torch.zeros(N // 2, device=card)
    look(dist.reduce_scatter_tensor(scattered, mine, async_op=True), scattered)
    received = torch.zeros(N, device=card)
    sent, work = dist.isend(mine, other), dist.irecv(received, other)
    look(work, received)
    sent.wait()
    return seen


def test_an_output_appears_when_somebody_waited():
    for rank, seen in enumerate(run_ranks(_outputs, 2, True, device="adversarial")):
        assert seen == [3, 2, 2 - rank, 2 - rank, 3, 2 - rank]
    for rank, seen in enumerate(run_ranks(_outputs, 2, False, device="adversarial")):
        assert seen == [rank + 1, rank + 1, 0, 0, 0, 0]
    assert run_ranks(_outputs, 2, True, device="emulated")[0] == [3, 2, 2, 2, 3, 2]


def _wait_on_another_stream(rank, device, ordered):
    x, stream = torch.full((N,), float(rank + 1), device=device.torch_device), device.new_stream()
    stream.wait_stream(device.current_stream())
    with device.on_stream(stream):
        dist.all_reduce(x)
    if ordered:
        device.current_stream().wait_stream(stream)
    seen = (x * 1)[0].item()
    device.synchronize()
    return seen


def test_a_wait_counts_for_the_stream_that_waits():
    assert run_ranks(_wait_on_another_stream, 2, True, device="adversarial") == [3, 3]
    assert run_ranks(_wait_on_another_stream, 2, False, device="adversarial") == [1, 2]


def _input_that_goes(rank, device, how, wait):
    """Sends a buffer and then writes, empties or drops it; returns the complaint, "" for none, and what arrived."""
    other, out = 1 - rank, torch.full((N,), float(rank + 1), device=device.torch_device)
    got = torch.zeros(N, device=device.torch_device)
    received, sent = dist.irecv(got, other), dist.isend(out, other)
    if wait:
        sent.wait()
    if how == "written":
        out.fill_(9)
    elif how == "emptied":
        out.untyped_storage().resize_(0)
    elif how == "dropped":
        del out
    received.wait()
    try:
        sent.wait()
        device.synchronize()
        complaint = ""
    except RuntimeError as error:
        complaint = str(error)
    return complaint, (got * 1)[0].item()


@pytest.mark.parametrize("how", ["written", "emptied", "dropped"])
def test_an_input_must_stay_until_somebody_waited(how):
    assert run_ranks(_input_that_goes, 2, how, True, device="adversarial") == [("", 2.0), ("", 1.0)]
    for complaint, _ in run_ranks(_input_that_goes, 2, how, False, device="adversarial"):
        if how == "dropped":  # a real collective too keeps its tensors until the wait
            assert complaint == ""
        else:
            assert "an input of send (float [1024]) changed while the collective could still read it" in complaint


def _chain(rank, device):
    """Collectives of one group follow each other without waits in between; the last wait covers the first."""
    x = torch.full((N,), float(rank + 1), device=device.torch_device)
    y = torch.zeros(2 * N, device=device.torch_device)
    dist.all_reduce(x, async_op=True)
    dist.all_reduce(x, async_op=True)
    work = dist.all_gather_into_tensor(y, x, async_op=True)
    dist.barrier()
    work.wait()
    return (y * 1).unique().tolist(), x.unique().tolist()


def test_collectives_of_one_group_follow_each_other():
    assert run_ranks(_chain, 2, device="adversarial") == [([6.0], [6.0])] * 2


def _meet_on_the_host_first(rank, device):
    """Ranks that meet elsewhere before they wait: a late collective needs nobody's synchronisation to get on."""
    x = torch.full((N,), float(rank + 1), device=device.torch_device)
    work = dist.all_reduce(x, async_op=True) if rank == 0 else None
    dist.all_reduce(torch.zeros(1))
    work = work or dist.all_reduce(x, async_op=True)
    dist.all_reduce(torch.zeros(1))
    before = device.memory().allocated
    work.wait()
    del work
    y = x + 1
    del x
    return y[0].item(), device.memory().allocated - before


def test_late_collectives_do_not_hold_other_ranks_up():
    assert run_ranks(_meet_on_the_host_first, 2, device="adversarial") == [(4.0, 0)] * 2


def _results_after_the_group_is_gone(rank, device):
    group = dist.new_group([0, 1])
    x = torch.full((N,), float(rank + 1), device=device.torch_device)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return x[0].item()


def test_results_outlive_their_group():
    assert run_ranks(_results_after_the_group_is_gone, 2, device="adversarial") == [3.0, 3.0]
