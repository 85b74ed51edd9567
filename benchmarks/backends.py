"""Compare the training backends: seconds of a training step by each, and of switches to the engine's layout.

    python benchmarks/backends.py --json backends.json [--rounds 5] [--layout tp=2,ep=2]

A Qwen3-MoE of 25M parameters (fp32) on four emulated NPUs, one process and one thread each. Both backends train the
same packed batch in the same layout with the same optimizer; their sides run in every round, in rotating order. Figures
are medians in seconds from the first rank's start to the last rank's end; the first round warms up. Switches are
verified element by element after the last round.

    floor     the matrix products of a step alone, forward and backward, on the rank that has most to do
    embedded  forward_backward and optimizer_step of this project's model
    megatron  the same with Megatron-Core's (training.backend=megatron), where it is installed
    to EP4    the switch of the weights from the training layout to an engine in EP4, and back
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fusion.model import Parallel  # noqa: E402
from fusion.training.backends.support import INSTALL, installed_version  # noqa: E402

WORLD = 4
SHAPE = dict(
    model_type="qwen3_moe",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=224,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
)
SAMPLES, LENGTH, TOKEN_BUDGET = 32, 128, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="tp=2,ep=2", help="sizes of the training layout's axes")
    args = parser.parse_args()
    sizes = {axis: int(size) for axis, size in (item.split("=") for item in args.layout.split(","))}

    import torch.multiprocessing as mp  # only now: --help must not wait for torch

    from benchmarks.backends_ranks import rank_main

    if installed_version() is None:
        print(f"Megatron-Core is not measured: {INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, Parallel(WORLD, **sizes), args.rounds), WORLD)
        result = json.loads(Path(folder, "result.json").read_text())
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the median of every side, and the ratios of the trainers to the floor and to each other."""
    figures: dict[str, Any] = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    for name in ("embedded", "megatron"):
        if f"{name}_s" in figures:
            figures[f"{name}_to_floor"] = figures[f"{name}_s"] / figures["floor_s"]
    if "megatron_s" in figures:
        ratios = [theirs / ours for ours, theirs in zip(seconds["embedded"], seconds["megatron"], strict=True)]
        figures["megatron_to_embedded"] = statistics.median(ratios)
    return figures


def print_table(result: dict[str, Any]) -> None:
    figures = result["figures"]
    print(f"{result['device']}, {result['parameters'] / 1e6:.0f}M parameters, training in {result['layout']}")
    print(f"floor (matrix products){figures['floor_s']:12.3f} s a step")
    for name in ("embedded", "megatron"):
        if f"{name}_s" in figures:
            print(f"{name:23}{figures[f'{name}_s']:12.3f} s a step, {figures[f'{name}_to_floor']:.2f} x the floor")
            to, back = (figures[f"{name}_{way}_s"] for way in ("to_engine", "to_trainer"))
            print(f"{'… to EP4 and back':23}{to:12.3f} s, {back:.3f} s")
    if "megatron_to_embedded" in figures:
        print(f"megatron / embedded    {figures['megatron_to_embedded']:12.2f} (median of {result['rounds']} rounds)")


if __name__ == "__main__":
    main()
