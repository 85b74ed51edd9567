"""States that stream through two slots equal states that stay, bit for bit, and never all sit in HBM."""

from __future__ import annotations

import pytest
import torch

from fusion.offload import HostPool, StreamedStates

NAMES = ("master", "exp_avg", "exp_avg_sq")
SIZES = (4096, 1000, 4096, 64, 3000)
GROUPS = [dict.fromkeys(NAMES, numel) for numel in SIZES]


def step(groups, number: int) -> None:
    """An update that mixes the states, so that a state of a wrong group or step shows."""
    for index, states in groups:
        gradient = torch.full_like(states["master"], 0.1 * number + index)
        states["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
        states["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        states["master"].addcdiv_(states["exp_avg"], states["exp_avg_sq"].sqrt() + 1e-8, value=-0.01)


def fill(groups) -> None:
    for index, states in groups:
        for number, state in enumerate(states.values()):
            state.copy_(torch.arange(state.numel()) + 10 * index + number)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_three_steps_equal_those_of_states_that_stay(device, count):
    resident = [
        (index, {name: torch.zeros(numel, device=device.torch_device) for name, numel in sizes.items()})
        for index, sizes in enumerate(GROUPS[:count])
    ]
    streamed = StreamedStates(device, GROUPS[:count])
    for states in (resident, streamed):
        fill(states)
        for number in range(3):
            step(states, number)
    tensors = streamed.tensors()
    assert len(tensors) == 3 * count and all(tensor.device.type == "cpu" for tensor in tensors.values())
    for index, states in resident:
        for name, state in states.items():
            assert torch.equal(state.cpu(), tensors[f"{name}.{index}"])


def test_at_most_two_groups_are_in_memory_and_none_between_steps(device):
    groups = [dict.fromkeys(NAMES, 1 << 16)] * 6
    streamed = StreamedStates(device, groups)
    before = device.memory().allocated
    owned = device.memory_by_owner()["optimizer"]
    device.reset_peak()
    for _, states in streamed:
        states["master"].add_(1.0)
        assert device.memory_by_owner()["optimizer"] - owned >= 2 * 3 * 4 * (1 << 16)
    memory = device.memory()
    assert memory.peak_allocated - before <= 2 * 3 * 4 * (1 << 16) + 65536  # what the loop's body takes
    assert memory.allocated == before


def test_uploads_that_the_body_queues_are_stored(device):
    """A slot is stored, and filled again, behind everything its user has queued, kernels and copies alike."""
    streamed = StreamedStates(device, GROUPS)
    uploads = [device.host_empty((numel,), torch.float32).fill_(index) for index, numel in enumerate(SIZES)]
    for index, states in streamed:
        states["master"].copy_(uploads[index], non_blocking=True)
    tensors = streamed.tensors()
    assert all(torch.equal(tensors[f"master.{index}"], upload) for index, upload in enumerate(uploads))


def test_the_host_may_look_while_a_loop_runs(device):
    """Groups before the last are stored, copies and all; what is written to the next one comes too late to be seen."""
    streamed = StreamedStates(device, GROUPS)
    upload = device.host_empty((SIZES[0],), torch.float32).fill_(5)
    for index, states in streamed:
        if index == 0:
            states["master"].copy_(upload, non_blocking=True)
            streamed.tensors()["master.1"].fill_(9.0)
        elif index == 1:
            assert torch.equal(streamed.tensors()["master.0"], upload)
            assert not states["master"].any()


def test_slots_take_memory_that_the_current_stream_may_still_use(device):
    streamed = StreamedStates(device, [{"master": 4096}])
    other, download = torch.full((4096,), 7.0, device=device.torch_device), device.host_empty((4096,), torch.float32)
    place = other.data_ptr()
    download.copy_(other, non_blocking=True)
    del other
    for _, states in streamed:
        assert states["master"].data_ptr() == place, "else this test shows nothing"
        streamed.tensors()  # the copy in runs as soon as it can
        states["master"].add_(1.0)
    assert bool((streamed.tensors()["master.0"] == 1).all()) and bool((download == 7).all())


def test_what_is_written_to_the_host_is_what_the_next_step_sees(device):
    streamed = StreamedStates(device, GROUPS)
    step(streamed, 1)
    for tensor in streamed.tensors().values():
        tensor.fill_(3.0)
    for _, states in streamed:
        assert all(bool((state.cpu() == 3.0).all()) for state in states.values())


def test_a_step_that_fails_keeps_the_groups_it_had_not_reached(device):
    streamed = StreamedStates(device, GROUPS, pool := HostPool(device))
    before = device.memory().allocated
    with pytest.raises(FloatingPointError):
        for index, states in streamed:
            states["master"].fill_(1.0)
            if index == 2:
                raise FloatingPointError
    masters = [streamed.tensors()[f"master.{index}"] for index in range(len(SIZES))]
    assert [float(master.sum()) for master in masters] == [4096, 1000, 0, 0, 0]
    step(streamed, 1)
    assert device.memory().allocated == before
    assert pool.nbytes < 2 * 3 * 4 * sum(SIZES)


def test_views_that_outlive_the_loop_hold_no_memory(device):
    """Reading a slot after its loop must not show another group's content."""
    streamed = StreamedStates(device, GROUPS)
    kept = [states["master"] for _, states in streamed]
    assert all(view.untyped_storage().nbytes() == 0 for view in kept)
