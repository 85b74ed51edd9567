"""Switches between real processes on emulated cards: bitwise, in the allocator's figures, and what failure does."""

from __future__ import annotations

import dataclasses
import gc
import pickle

import pytest
import torch
import torch.distributed as dist

from fusion.ep_switch import Layout, SwitchError, execute, plan_switch, transfer, weights_checksum
from fusion.model import Mesh, Parallel, Transformer
from tests.helpers import run_ranks, tiny_config

BUCKET = 1 << 14
MOE = tiny_config(num_key_value_heads=2)
UNTIED = tiny_config(tie_word_embeddings=False)
DENSE = tiny_config(experts=False)


def element_values(name: str, region, dtype: torch.dtype) -> torch.Tensor:
    """A value for every element of a global tensor, from its name and index alone."""
    total = torch.full([stop - start for start, stop in region], float(sum(name.encode()) % 97), dtype=torch.float64)
    for d, (start, stop) in enumerate(region):
        shape = [-1 if e == d else 1 for e in range(len(region))]
        total += torch.sin(torch.arange(start, stop, dtype=torch.float64) * (d + 1.7)).view(shape) * (d + 1)
    return total.to(torch.float32).to(dtype)


def fill(model: Transformer) -> None:
    for param in model.table:
        for part in param.parts:
            values = element_values(part.name, part.region, model.weights.dtype)
            part.view(model.weights.views[param.name]).copy_(values)


def assert_filled(model: Transformer, via: torch.dtype) -> None:
    for param in model.table:
        for part in param.parts:
            want = element_values(part.name, part.region, via).to(model.weights.dtype)
            assert torch.equal(part.view(model.weights.views[param.name]).cpu(), want), part.name


def build(config, parallel: Parallel, device, dtype=torch.float32, released=False) -> tuple[Transformer, Layout]:
    """A model whose grid may be repeated over the world: each repetition is an engine of its own."""
    world = dist.get_world_size()
    mesh = None
    for first in range(0, world, parallel.world):
        made = Mesh.create(parallel, tuple(range(first, first + parallel.world)))
        mesh = made if made.rank >= 0 else mesh
    model = Transformer(config, mesh, device, dtype, bucket_bytes=BUCKET)
    if released:
        model.weights.release()
    return model, Layout(config, parallel, tuple(range(world)), dtype, BUCKET)


def there_and_back(rank, device, config, one, other, dtypes, checksum):
    trainer, train_layout = build(config, one, device, dtypes[0])
    engine, infer_layout = build(config, other, device, dtypes[1], released=True)
    fill(trainer)
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    before = weights_checksum(trainer, dtype=narrow)
    gc.collect()  # models of earlier tests would go while this one's memory is measured
    plan = plan_switch(train_layout, infer_layout, BUCKET)
    back = plan_switch(infer_layout, train_layout, BUCKET)
    reports = []
    for _ in range(2):
        reports.append((execute(plan, trainer, engine, device, checksum=checksum), plan))
        assert_filled(engine, via=narrow)
        assert sum(flat.untyped_storage().nbytes() for _, flat in trainer.weights) == 0
        assert weights_checksum(engine, dtype=narrow) == before
        reports.append((execute(back, engine.weights, trainer.weights, device, checksum=checksum), back))
        assert_filled(trainer, via=narrow)
        assert sum(flat.untyped_storage().nbytes() for _, flat in engine.weights) == 0
    for report, done in reports:
        blocks = len(done.source.buckets(rank)) + len(done.target.buckets(rank)) + 2
        assert 0 <= report.peak_bytes - done.peak_bytes(rank) <= 512 * blocks, "the plan's peak but for rounding"
        itemsize = done.wire_dtype.itemsize
        assert report.bytes_moved == itemsize * sum(
            m.numel for step in done.steps(rank) for moves in step.receive.values() for m in moves
        )
    return reports[0][0], before


FP32 = (torch.float32, torch.float32)
CASES = {
    "TP2EP2-EP4": (4, MOE, Parallel(4, 2, 2), Parallel(4, 1, 4), FP32, True),
    "EP4-TP4": (4, tiny_config(num_key_value_heads=1), Parallel(4, 1, 4), Parallel(4, 4, 1), FP32, False),
    "TP2EP2-two engines of EP2": (4, UNTIED, Parallel(4, 2, 2), Parallel(2, 1, 2), FP32, False),
    "TP2-TP1": (2, DENSE, Parallel(2, 2, 1), Parallel(2, 1, 1), FP32, True),
    "float32-bfloat16": (2, UNTIED, Parallel(2, 2, 1), Parallel(2, 1, 2), (torch.float32, torch.bfloat16), True),
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_bitwise(case):
    world, config, one, other, dtypes, checksum = CASES[case]
    results = run_ranks(there_and_back, world, config, one, other, dtypes, checksum)
    assert len({total for _, total in results}) == 1
    assert sum(report.bytes_moved for report, _ in results) > 0


def test_equal_layouts_move_nothing():
    results = run_ranks(there_and_back, 2, MOE, Parallel(2, 1, 2), Parallel(2, 1, 2), FP32, True)
    assert all(report.bytes_moved == 0 and report.bytes_local > 0 for report, _ in results)


def corrupted(rank, device, checksum):
    """Rank 1 sends one wrong byte the second time it sends."""
    trainer, train_layout = build(MOE, Parallel(2, 1, 2), device)
    engine, infer_layout = build(MOE, Parallel(2, 2, 1), device, released=True)
    fill(trainer)
    honest, sends = dist.all_to_all_single, [0]

    def flip(received, sent, *args, **kwargs):
        if rank == 1 and sent.dtype == torch.uint8 and sent.numel():
            sends[0] += 1
            if sends[0] == 2:
                sent[5] += 1
        return honest(received, sent, *args, **kwargs)

    transfer.dist.all_to_all_single = flip
    try:
        execute(plan_switch(train_layout, infer_layout, BUCKET), trainer, engine, device, checksum=checksum)
    except SwitchError as error:
        assert str(pickle.loads(pickle.dumps(error))) == str(error), "errors travel to the controller"
        return str(error), sum(flat.untyped_storage().nbytes() for _, flat in engine.weights)
    finally:
        transfer.dist.all_to_all_single = honest
    try:
        return "", weights_checksum(engine)
    except RuntimeError as error:
        return "", str(error)


def test_a_corrupted_transfer_is_found_and_named_on_all_ranks():
    results = run_ranks(corrupted, 2, True)
    assert len({message for message, _ in results}) == 1
    message, held = results[0]
    assert "failed on rank 0 in round" in message and "at model." in message
    assert "from rank 1 arrived on rank 0 with another checksum" in message
    assert held == 0


def test_without_checksums_the_totals_still_tell():
    results = run_ranks(corrupted, 2, False)
    intact = run_ranks(there_and_back, 2, MOE, Parallel(2, 1, 2), Parallel(2, 2, 1), FP32, False)[0][1]
    assert all(message == "" and total != intact for message, total in results)
    assert "ranks 0 and 1 hold different values of model.layers" in results[0][1]


def wrong_expert(rank, device):
    """A plan that reads a neighbouring expert: every byte arrives as sent, and yet the weights are wrong."""
    trainer, train_layout = build(MOE, Parallel(2, 1, 2), device)
    engine, infer_layout = build(MOE, Parallel(2, 2, 1), device, released=True)
    fill(trainer)
    plan = plan_switch(train_layout, infer_layout, BUCKET)
    rounds = [list(round_.moves) for round_ in plan.rounds]
    at, first = next(
        (i, k) for i, moves in enumerate(rounds) for k, m in enumerate(moves) if "experts.0.gate" in m.name
    )
    other = next(m for moves in rounds for m in moves if m.name == rounds[at][first].name.replace("s.0.g", "s.1.g"))
    rounds[at][first] = dataclasses.replace(rounds[at][first], source=other.source)
    moved = tuple(
        dataclasses.replace(round_, moves=tuple(moves)) for round_, moves in zip(plan.rounds, rounds, strict=True)
    )
    before = weights_checksum(trainer)
    execute(dataclasses.replace(plan, rounds=moved), trainer, engine, device, checksum=True)
    try:
        return weights_checksum(engine) == before
    except RuntimeError as error:
        return str(error)


def test_a_wrong_plan_shows_in_the_weights_checksum():
    assert all(result is False or "hold different values" in str(result) for result in run_ranks(wrong_expert, 2))


def refused(rank, device):
    trainer, train_layout = build(DENSE, Parallel(2, 2, 1), device)
    engine, infer_layout = build(DENSE, Parallel(2, 1, 1), device, released=rank == 0)
    fill(trainer)
    plan = plan_switch(train_layout, infer_layout, BUCKET)
    messages = []
    for attempt in (plan, plan_switch(train_layout, infer_layout, BUCKET * (1 + rank))):
        try:
            execute(attempt, trainer, engine, device)
        except SwitchError as error:
            messages.append(str(error))
        engine.weights.release()
    assert_filled(trainer, via=torch.float32)
    return messages


def test_what_is_refused_is_refused_on_all_ranks_and_harms_nothing():
    results = run_ranks(refused, 2)
    assert results[0] == results[1]
    not_empty, other_plan = results[0]
    assert "rank 1 before the first round" in not_empty and "release the target before the switch" in not_empty
    assert other_plan.count("plans another switch") == 2


def out_of_memory(rank, device):
    """Rank 1 has no room for the second half of its target."""
    trainer, train_layout = build(DENSE, Parallel(2, 2, 1), device)
    engine, infer_layout = build(DENSE, Parallel(2, 1, 1), device, released=True)
    fill(trainer)
    plan = plan_switch(train_layout, infer_layout, BUCKET)
    hog = None
    if rank == 1:
        before = device.memory()
        wanted = plan.peak_bytes(rank) - train_layout.nbytes(rank)
        hog = torch.zeros(before.free - wanted // 2, dtype=torch.uint8, device=device.torch_device)
    try:
        execute(plan, trainer, engine, device)
    except SwitchError as error:
        return str(error), sum(flat.untyped_storage().nbytes() for _, flat in engine.weights)
    finally:
        del hog
    return "", 0


def test_out_of_memory_on_one_rank_ends_the_switch_on_all():
    results = run_ranks(out_of_memory, 2)
    assert results[0] == results[1]
    message, held = results[0]
    assert "failed on rank 1 in round" in message and "OutOfMemoryError" in message and held == 0


def test_one_process_needs_no_torch_distributed():
    from fusion.npu import open_device

    assert not dist.is_initialized()
    device = open_device("emulated", index=0)
    models = [Transformer(UNTIED, Mesh.single(), device, dtype, bucket_bytes=BUCKET) for dtype in FP32]
    layout = Layout(UNTIED, Parallel(), (0,), bucket_bytes=BUCKET)
    fill(models[0])
    models[1].weights.release()
    report = execute(plan_switch(layout, layout, BUCKET), *models, device, checksum=True)
    assert_filled(models[1], via=torch.float32)
    assert report.bytes_moved == 0
    assert report.peak_bytes <= layout.nbytes(0) + 4 * max(layout.bucket_nbytes(0))
