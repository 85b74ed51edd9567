"""Measure one pair of layouts of `benchmarks/switch.py` in fresh processes, one and one thread for each rank."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import switch_megatron
from benchmarks.rotation import in_rotation
from benchmarks.switch_clock import worst
from benchmarks.switch_floor import Floor, byte_matrix, floor_of
from benchmarks.switch_pair import Extra, Pair
from fusion.model import ModelConfig, Parallel, global_params
from fusion.npu import Device, open_device
from tests.ep_switch.mutants import frees_nothing, in_layer_order

SHAPE = dict(
    model_type="qwen3_moe",
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=336,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
)
WORLD = 4
CAPACITY_BYTES = 4 << 30


def run(layouts: tuple[Parallel, Parallel], rounds: int) -> dict[str, Any]:
    """Measure a pair in fresh processes, one per rank; `figures` has an entry for each direction."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, layouts, rounds), WORLD)
        return json.loads(Path(folder, "result.json").read_text())


def rank_main(rank: int, folder: str, layouts: tuple[Parallel, Parallel], rounds: int) -> None:
    torch.set_num_threads(1)
    device = open_device("emulated", index=rank, capacity_bytes=CAPACITY_BYTES)
    dist.init_process_group(
        device.process_group_backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    config, description = ModelConfig.from_hf(SHAPE), device.describe()
    measured = measure(config, device, layouts=layouts, rounds=rounds)
    if rank == 0:
        result = {
            "device": description,
            "rounds": rounds,
            "torch": torch.__version__,
            "parameters": sum(torch.Size(shape).numel() for shape in global_params(config).values()),
            "model": SHAPE,
            "figures": measured,
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure(
    config: ModelConfig, device: Device, *, layouts: tuple[Parallel, Parallel], rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of both directions, the same on every rank."""
    one, other = layouts
    pair = Pair(config, device, one=one, other=other)
    memory = measure_memory(pair)
    floors = [Floor(device, byte_matrix(plan)) for plan in pair.plans]
    refit = switch_megatron.Refit(config, device, one=one, other=other) if switch_megatron.why_not() is None else None
    switches: list[list[float]] = [[], []]
    refits: list[list[tuple[float, int]]] = [[], []]
    sides = ["switch", "floor", *(["refit"] if refit else [])]
    for round_ in range(-1, rounds):
        keep = round_ >= 0
        for source in (0, 1):
            for side in in_rotation(sides, round_):
                if side == "switch":
                    seconds, _ = pair.switch(source)
                    switches[source] += [seconds] if keep else []
                elif side == "floor":
                    floors[source].measure(keep)
                else:
                    assert refit is not None
                    timed_refit = refit.time(source, verify=not keep)
                    refits[source] += [timed_refit] if keep else []
    pair.verify(0)
    return [times(floors[i], switches[i], refits[i]) | memory[i] for i in (0, 1)]


def measure_memory(pair: Pair) -> list[dict[str, Any]]:
    """Measure the peak memory of switches, alone on the cards and from an empty cache, and which variants of the plan
    fit the bound. One switch of each direction is verified. Starts and ends with the first end resident."""
    extras: list[list[Extra]] = [[], []]
    for repetition in range(3):
        for source in (0, 1):
            pair.device.empty_cache()
            extras[source].append(pair.switch(source)[1])
            if repetition == 0:
                pair.verify(1 - source)
    figures = []
    for source in (0, 1):
        entry: dict[str, Any] = {
            "peak_extra_bytes": max(extra.allocated for extra in extras[source]),
            "peak_extra_reserved_bytes": max(extra.reserved for extra in extras[source]),
            "bucket_bytes": pair.bucket_bytes,
        }
        for name, change in (("plan", None), ("frees_nothing", frees_nothing), ("layer_order", in_layer_order)):
            pair.refill(source)
            entry[f"{name}_fits_bound"] = pair.fits_the_bound(source, change(pair.plans[source]) if change else None)
        figures.append(entry)
    pair.refill(0)
    return figures


def times(floor: Floor, switches_s: list[float], refits: list[tuple[float, int]]) -> dict[str, Any]:
    seconds_s = {name: statistics.median(seconds) for name, seconds in floor.seconds.items()}
    wire, floor_s = floor_of(seconds_s)
    switch_s = statistics.median(switches_s)
    return {
        "bytes_moved": floor.moved,
        "packed_bytes": worst(floor.packed),
        "floor_s": floor_s,
        "floor_wire": wire,
        "wire_s": {name: seconds_s[name] for name in floor.wires},
        "memcpy_s": seconds_s["memcpy"],
        "local_s": seconds_s["local"],
        "switch_s": switch_s,
        "switch_s_min_max": [min(switches_s), max(switches_s)],
        "ratio_to_floor": switch_s / floor_s,
        "megatron_refit_s": statistics.median(seconds for seconds, _ in refits) if refits else None,
        "megatron_peak_extra_bytes": max(peak for _, peak in refits) if refits else None,
    }
