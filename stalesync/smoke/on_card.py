"""Check a card, its collectives, a switch and a model, in a process of its own: `python -m stalesync.smoke.on_card …`.

The last line of the output is a JSON object of figures; a check that does not hold raises, with both values."""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion.ep_switch import Layout, Switcher, plan_switch, weights_checksum
from fusion.ep_switch.checksum import run_sums
from fusion.model import Mesh, ModelConfig, Parallel, Transformer
from fusion.model.box_checksum import box_checksum
from fusion.model.formats import embedded_format
from fusion.npu import Device, open_device
from fusion.telemetry.memory import MIB
from stalesync.process.card_environment import MAX_BUFFER_MB
from stalesync.smoke import model_checks
from stalesync.smoke.report import check

BUFFER_BYTES = 64 * MIB
LEAST_MAPPED_BYTES = BUFFER_BYTES - 2 * 20 * MIB
"""HBM that the buffer takes and gives back for itself: it may share the pages at both ends, of 20 MiB on a real card"""
WORKSPACE_BYTES = 64 * MIB
"""What the operators of a card may keep for their next call"""
MESSAGE_BYTES = 16 * MIB
COMMUNICATOR_BYTES = 64 * MIB
"""What a communicator of HCCL may take beside its two buffers"""
BUCKETS_OF_A_SHARD = 16
GRANULE = 512
"""Bytes that an allocator rounds a block up to"""

SHAPE = model_checks.SHAPE | dict(
    vocab_size=2048,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=128,
)
"""15 million parameters"""


def check_device(device: Device) -> dict[str, Any]:
    """Allocate, compute, copy and release; every byte must be counted and come back."""
    module = torch.get_device_module(device.torch_device)
    device.empty_cache()
    before, free_before = device.memory(), module.mem_get_info(device.index)[0]
    device.reset_peak()
    with device.owner("weights"):
        buffer = torch.zeros(BUFFER_BYTES // 4, device=device.torch_device)
    during, free_during = device.memory(), module.mem_get_info(device.index)[0]
    grown = during.allocated - before.allocated
    check(BUFFER_BYTES <= grown <= BUFFER_BYTES + 2 * MIB, "bytes allocated for a buffer of 64 MiB", grown)
    check(free_before - free_during >= LEAST_MAPPED_BYTES, "HBM taken from the card", free_before, free_during)
    owned = device.memory_by_owner()["weights"]
    check(BUFFER_BYTES <= owned <= grown, "bytes counted for the owner `weights`", owned)
    host = device.host_empty((BUFFER_BYTES // 4,), torch.float32).copy_(torch.arange(BUFFER_BYTES // 4))
    to_card_s = seconds_of(device, partial(buffer.copy_, host, non_blocking=True))
    back = device.host_empty((BUFFER_BYTES // 4,), torch.float32)
    to_host_s = seconds_of(device, partial(back.copy_, buffer, non_blocking=True))
    check(torch.equal(back, host), "a copy to the card and back is bitwise the same", "it is not")
    errors = {dtype: error_of_product(device, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    check(max(errors.values()) < 1e-2, "relative error of a product against the CPU's by dtype", errors)
    check_checksums(device)
    device.synchronize()
    device.empty_cache()
    held, free_held = device.memory(), module.mem_get_info(device.index)[0]
    del buffer
    device.empty_cache()
    after, free_after = device.memory(), module.mem_get_info(device.index)[0]
    check(held.allocated - after.allocated == grown, "bytes released", held.allocated - after.allocated, grown)
    check(free_after - free_held >= LEAST_MAPPED_BYTES, "HBM given back to the card", free_held, free_after)
    kept = after.allocated - before.allocated
    check(kept <= WORKSPACE_BYTES, "bytes kept after the release", kept)
    return {
        "card": device.describe(),
        "capacity_bytes": during.capacity,
        "allocated_bytes": grown,
        "peak_bytes": held.peak_allocated,
        "kept_bytes": kept,
        "to_card_bytes_per_s": BUFFER_BYTES / to_card_s,
        "to_host_bytes_per_s": BUFFER_BYTES / to_host_s,
        "product_error": errors["float32"],
        "bfloat16_error": errors["bfloat16"],
    }


def error_of_product(device: Device, dtype: torch.dtype) -> float:
    """Return the largest error of a product of 256 x 256 matrices, relative to the largest value."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=random).to(dtype) for _ in range(2))
    computed, expected = (a.to(device.torch_device) @ b.to(device.torch_device)).cpu(), a.float() @ b.float()
    return float((computed - expected).abs().max() / expected.abs().max())


def check_checksums(device: Device) -> None:
    """Compare checksums that the card computes with the host's: its integers must hold 63 bits in products and sums."""
    random = torch.Generator().manual_seed(0)
    host = torch.randn(512, 3000, generator=random).to(torch.bfloat16)
    card, region, ends = host.to(device.torch_device), ((0, 512), (0, 3000)), [1, 70_000, host.numel()]
    sums = [box_checksum(values, "weight", region) for values in (card, host)]
    check(sums[0] == sums[1], "checksum of a matrix on the card and on the host", *sums)
    by_run = [run_sums(values.flatten(), ends).tolist() for values in (card, host)]
    check(by_run[0] == by_run[1], "checksums of runs on the card and on the host", *by_run)


def check_collectives(device: Device) -> dict[str, Any]:
    """All-reduce, and all-to-all with equal and with uneven and empty parts; results are compared with what they must
    be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = MESSAGE_BYTES // 4 // world * world
    values = torch.full((count,), float(rank + 1), device=device.torch_device)
    total = world * (world + 1) / 2
    dist.all_reduce(values)
    check(bool((values == total).all()), "all_reduce of 1 … world", values[0].item(), total)
    reduce_s = seconds_of(device, lambda: dist.all_reduce(values))
    sent = torch.full((count,), float(rank), device=device.torch_device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    expected = torch.arange(world, device=device.torch_device, dtype=torch.float32).repeat_interleave(count // world)
    check(torch.equal(received, expected), "all_to_all", received[:: count // world].tolist())
    exchange_s = seconds_of(device, lambda: dist.all_to_all_single(received, sent))
    uneven = [other for other in range(world)]  # to rank r go r elements of each rank
    received = torch.empty(rank * world, device=device.torch_device)
    dist.all_to_all_single(received, sent[: sum(uneven)].contiguous(), [rank] * world, uneven)
    expected = torch.arange(world, device=device.torch_device, dtype=torch.float32).repeat_interleave(rank)
    check(torch.equal(received, expected), "all_to_all with uneven parts", received.tolist())
    return {
        "backend": device.process_group_backend,
        "cards": world,
        "communicator_bytes": check_communicator(device),
        "bytes": count * 4,
        "all_reduce_s": reduce_s,
        "all_to_all_s": exchange_s,
        "all_reduce_bytes_per_s": 2 * (world - 1) / world * count * 4 / reduce_s,
        "all_to_all_bytes_per_s": (world - 1) / world * count * 4 / exchange_s,
    }


def check_communicator(device: Device) -> int:
    """Return the HBM that one more communicator takes; HCCL's must be of two of its buffers."""
    module = torch.get_device_module(device.torch_device)
    value = torch.ones(1, device=device.torch_device)
    device.synchronize()
    free = module.mem_get_info(device.index)[0]
    dist.all_reduce(value, group=dist.new_group(backend=device.process_group_backend.rpartition(",")[-1]))
    device.synchronize()
    taken = free - module.mem_get_info(device.index)[0]
    if device.kind == "npu":
        buffer_mb = int(os.environ.get("HCCL_BUFFSIZE", MAX_BUFFER_MB))
        bound = (2 * buffer_mb << 20) + COMMUNICATOR_BYTES
        check(taken <= bound, f"HBM of a communicator with HCCL_BUFFSIZE={buffer_mb}", taken, bound)
    return taken


def layouts_of(world: int) -> tuple[Parallel, Parallel]:
    """Return the layouts of training and of generation that the stage `switch` connects."""
    if world == 1:
        return Parallel(1), Parallel(1)
    if world == 2:
        return Parallel(2, tp=2), Parallel(2, ep=2)
    return Parallel(world, tp=2, ep=2), Parallel(world, ep=4)


def check_switch(device: Device) -> dict[str, Any]:
    """Switch from a layout of training to one of generation and back, with checksums of all weights, and the
    allocator's peak against the plan's bound."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config, ranks = ModelConfig.from_hf(SHAPE), tuple(range(world))
    form = embedded_format(device.operators)
    whole = [Layout(config, parallel, ranks, torch.bfloat16, format=form) for parallel in layouts_of(world)]
    shard = max(layout.nbytes(place) for layout in whole for place in ranks)
    sizes = [shard // BUCKETS_OF_A_SHARD] * 2 if world > 1 else [shard // 16, shard // 24]  # else all is shared
    layouts = [
        Layout(config, parallel, ranks, torch.bfloat16, bucket_bytes=nbytes, format=form)
        for parallel, nbytes in zip(layouts_of(world), sizes, strict=True)
    ]
    train = _build(layouts[0], device)
    infer = _build(layouts[1], device, share=train.weights, resident=False)
    _fill(train)
    sums, figures = [weights_checksum(train)], dict[str, Any]()
    for name, ends, models in (("to_infer", (0, 1), (train, infer)), ("to_train", (1, 0), (infer, train))):
        plan = plan_switch(layouts[ends[0]], layouts[ends[1]], max(sizes))
        others = device.memory().allocated - layouts[ends[0]].nbytes(rank)
        device.empty_cache()
        device.reset_peak()
        report = Switcher(plan, models[0], models[1], device=device).run()
        peak = device.memory().peak_allocated - others
        units = sum(len(layout.units(rank)) for layout in layouts) + 4
        bound = plan.bound_bytes(rank) + units * GRANULE
        check(peak <= bound, f"peak of the switch {name} within its bound", peak, bound)
        sums.append(weights_checksum(models[1]))
        figures |= {
            f"{name}_s": report.seconds,
            f"{name}_bytes": report.bytes_moved + report.bytes_local,
            f"{name}_peak_bytes": peak,
            f"{name}_bound_bytes": bound,
            f"{name}_exchange": report.exchange,
        }
    check(len(set(sums)) == 1, "checksums of the weights before, in between and after are equal", *sums)
    return {"layouts": " ↔ ".join(map(str, layouts_of(world))), "checksum": f"{sums[0]:016x}", **figures}


def _build(layout: Layout, device: Device, share: Any = None, resident: bool = True) -> Transformer:
    mesh = Mesh.create(layout.parallel, layout.ranks) if len(layout.ranks) > 1 else Mesh.single()
    return Transformer(
        layout.config, mesh, device, layout.dtype, bucket_bytes=layout.bucket_bytes, share=share, resident=resident
    )


@torch.no_grad()
def _fill(model: Transformer) -> None:
    """Give every element a value from its tensor's name and its global index, which is the same in every layout."""
    for param in model.table:
        for part in param.parts:
            view = part.view(model.weights.views[param.name])
            value = torch.zeros((), dtype=torch.float32, device=view.device)
            for dim, (start, stop) in enumerate(part.region):
                index = torch.arange(start, stop, device=view.device, dtype=torch.float32) * (dim * 31 + 1)
                value = value.unsqueeze(-1) + index
            view.copy_(value % 8191 + sum(part.name.encode()) % 97)


def seconds_of(device: Device, work: Callable[[], Any]) -> float:
    """Return the seconds of the second call of ``work``, to the end of the card's work."""
    work()
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start


ALONE = {"device": check_device, "model": model_checks.check_model}
"""Stages of one card"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=["count", "device", "hccl", "switch", "model"])
    parser.add_argument("--kind", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--store", type=Path, help="file by which the ranks find each other")
    options = parser.parse_args(arguments)
    if options.stage == "count":
        module = torch.get_device_module(open_device(options.kind).torch_device)
        print(json.dumps({"cards": module.device_count()}))
        return
    device = open_device(options.kind, index=options.rank, deterministic=True)
    if options.stage in ALONE:
        print(json.dumps(ALONE[options.stage](device)))
        return
    dist.init_process_group(
        device.process_group_backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.world
    )
    figures = check_collectives(device) if options.stage == "hccl" else check_switch(device)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
