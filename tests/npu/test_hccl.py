"""Collectives of the emulated card: gloo on zero-copy aliases."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_ranks


def _collectives(rank, device):
    world, card = dist.get_world_size(), device.torch_device
    assert dist.get_backend(dist.group.WORLD) is not None

    x = torch.full((4,), float(rank + 1), device=card)
    dist.all_reduce(x)
    assert x.device == card and x.tolist() == [world * (world + 1) / 2] * 4

    half = torch.full((4,), float(rank + 1), device=card, dtype=torch.bfloat16)
    work = dist.all_reduce(half, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert half.tolist() == [(world + 1) / 2] * 4
    assert work.result()[0].device == card
    assert work.get_future().value()[0].device == card

    parts = [torch.empty(2, device=card) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(rank), device=card))
    assert torch.stack(parts).tolist() == [[float(r)] * 2 for r in range(world)]

    whole = torch.empty(world * 2, device=card)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank), device=card))
    assert whole.tolist() == [float(r) for r in range(world) for _ in range(2)]

    piece = torch.empty(3, device=card)
    dist.reduce_scatter_tensor(piece, torch.arange(3.0 * world, device=card))
    assert piece.tolist() == [world * (3.0 * rank + i) for i in range(3)]

    piece = torch.empty(3, device=card)
    dist.reduce_scatter(piece, list(torch.arange(3.0 * world, device=card).chunk(world)))
    assert piece.tolist() == [world * (3.0 * rank + i) for i in range(3)]

    named = torch.full((3,), float(rank), device=card)
    dist.broadcast(named, src=world - 1)
    assert named.tolist() == [world - 1.0] * 3

    dist.barrier()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(world))


def _gathered(rank, device, shape, dtype):
    """What a rank gathers of tensors that count from 3 × rank on, and the number behind them, which stays as it is."""
    numel = torch.Size(shape).numel()
    mine = torch.arange(3 * rank, 3 * rank + numel, device=device.torch_device).to(dtype).view(shape)
    around = torch.full((numel * dist.get_world_size() + 1,), 7, device=device.torch_device).to(dtype)
    dist.all_gather_into_tensor(around[:-1], mine)
    return around.cpu()


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float64), ((3, 2), torch.bfloat16), ((5,), torch.bool), ((1 << 14,), torch.int32)],
    ids=["scalar", "matrix", "bits", "more bytes than are sent to each"],
)
def test_every_rank_gathers_the_shards_in_rank_order(shape, dtype, device):
    numel = torch.Size(shape).numel()
    wanted = torch.cat([torch.arange(3 * rank, 3 * rank + numel) for rank in range(3)] + [torch.tensor([7])]).to(dtype)
    for found in run_ranks(_gathered, 3, shape, dtype, device=device):
        assert torch.equal(found, wanted)


REDUCTIONS = [
    (dtype, op, numel)
    for dtype in (torch.float32, torch.bfloat16, torch.int64)
    for op in ("SUM", "MAX", "MIN", "AVG")
    for numel in (1, 3, 64, 1001, 1 << 14)
]
"""Small ones, which ranks send to each other at once, and larger ones, which gloo reduces around its rings"""


def _reduced(rank, device):
    """What a rank gets of all reductions on the card, and of the same on the host."""
    world, generator = dist.get_world_size(), torch.Generator().manual_seed(rank)
    found = {"card": [], "host": []}
    for dtype, op, numel in REDUCTIONS:
        if op == "AVG" and not dtype.is_floating_point:
            continue
        values = (torch.randn(world * numel, generator=generator) * 1000).to(dtype)
        for place, results in found.items():
            whole = values.to(device.torch_device if place == "card" else "cpu")
            total, piece = whole[:numel].clone(), torch.empty_like(whole[:numel])
            work = dist.all_reduce(total, getattr(dist.ReduceOp, op), async_op=True)
            dist.reduce_scatter_tensor(piece, whole, getattr(dist.ReduceOp, op))
            work.wait()
            results += [total.cpu(), piece.cpu()]
    return found


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_reduction_has_the_bits_of_one_on_the_host(world, device):
    for found in run_ranks(_reduced, world, device=device):
        assert len(found["card"]) > len(REDUCTIONS)
        assert all(map(torch.equal, found["card"], found["host"]))


def _polled(rank, device):
    total = torch.full((3,), rank + 1.0, device=device.torch_device)
    work = dist.all_reduce(total, async_op=True)
    while not work.is_completed():
        pass
    return total.tolist()


def test_a_reduction_that_is_completed_has_its_result():
    assert run_ranks(_polled, 2) == [[3.0] * 3] * 2


def _uneven_all_to_all(rank, device):
    """Rank r sends r + d rows to rank d (none from 0 to 0); every row says where it comes from and goes to."""
    world, card = dist.get_world_size(), device.torch_device
    sends = [rank + to for to in range(world)]
    receives = [source + rank for source in range(world)]
    rows = [[float(rank), float(to)] for to in range(world) for _ in range(sends[to])]
    x = torch.tensor(rows, device=card).reshape(-1, 2)
    out = torch.empty(sum(receives), 2, device=card)
    dist.all_to_all_single(out, x, receives, sends)
    assert out.tolist() == [[float(s), float(rank)] for s in range(world) for _ in range(receives[s])]

    outs = [torch.empty(2, device=card) for _ in range(world)]
    dist.all_to_all(outs, [torch.full((2,), float(10 * rank + to), device=card) for to in range(world)])
    assert [o[0].item() for o in outs] == [10.0 * s + rank for s in range(world)]


def _point_to_point(rank, device):
    world, card = dist.get_world_size(), device.torch_device
    right, left = (rank + 1) % world, (rank - 1) % world
    out, got = torch.full((5,), float(rank), device=card), torch.empty(5, device=card)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, got, left)]):
        work.wait()
    assert got.tolist() == [float(left)] * 5
    if rank == 0:
        dist.send(out, dst=1)
    elif rank == 1:
        dist.recv(got, src=0)
        assert got.tolist() == [0.0] * 5


def _subgroups(rank, device):
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(start, world, 2))) for start in range(2)]
    x = torch.full((2,), float(rank), device=device.torch_device)
    dist.all_reduce(x, group=groups[rank % 2])
    assert x.tolist() == [float(sum(range(rank % 2, world, 2)))] * 2
    on_host = torch.full((2,), float(rank))
    dist.all_reduce(on_host, group=groups[rank % 2])
    assert on_host.tolist() == x.tolist()
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)


def _data_parallel(rank, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(device.torch_device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.full((4, 8), float(rank + 1), device=device.torch_device)
    model(x).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient.device == device.torch_device
    return gradient.cpu()


def _memory_is_not_copied(rank, device):
    x = torch.ones(1 << 18, device=device.torch_device)
    device.reset_peak()
    before = device.memory().allocated
    dist.all_reduce(x)
    return device.memory().peak_allocated - before


def _everything(rank, device):
    for test in (_collectives, _uneven_all_to_all, _point_to_point, _subgroups):
        test(rank, device)
    return _memory_is_not_copied(rank, device), _data_parallel(rank, device)


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
def test_collectives_of_four_ranks(device):
    results = run_ranks(_everything, 4, device=device)
    assert [extra for extra, _ in results] == [0] * 4
    for _, gradient in results:
        assert torch.equal(gradient, results[0][1])
