"""Measure the engine against transformers' `generate` on one MoE checkpoint, and against its matrix products alone.

    python benchmarks/engine.py --json engine.json [--family qwen3_moe] [--rounds 5] [--threads 1] [--device cpu]

qwen3_moe: grouped-query attention. deepseek_v3: latent attention of the same hidden size, layers and experts.

equal: 64 sequences of 64 new tokens. ragged: 256 sequences of up to 256 new tokens that end at a stop token. Both
sides sample at temperature 1 from the same weights and prompts; the engine also returns logprobs. Only useful tokens
count: those that a batch computes after a sequence has ended do not. Every round runs all sides, in rotating order;
figures are medians, and the ratio is that of the medians. The floor repeats the products with weight matrices of the
engine's steps, with the same numbers of rows and evenly loaded experts, and nothing else (no attention).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CASES = {"equal": dict(batch=64, new_tokens=64, stop=()), "ragged": dict(batch=256, new_tokens=256, stop=(1,))}
TARGETS = {"qwen3_moe": {"equal": 1.5, "ragged": 3.5}, "deepseek_v3": {"equal": 1.0, "ragged": 2.5}}
"""Family → case → ratio to `generate`"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--family", choices=TARGETS, default="qwen3_moe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu (default), or a kind of fusion.npu: auto, emulated, …")
    parser.add_argument("--batch-invariant", action="store_true", help="rollout.batch_invariant=true")
    args = parser.parse_args()

    import torch  # only now: --help must not wait for torch

    from benchmarks.engine_sides import SHAPES, PlainCpu, build, measure
    from fusion.npu import open_device

    torch.set_num_threads(args.threads)
    device = PlainCpu() if args.device == "cpu" else open_device(args.device)

    hf, engine = build(device, args.batch_invariant, args.family)
    figures = {name: measure(hf, engine, device, rounds=args.rounds, **case) for name, case in CASES.items()}
    result = {
        "device": device.describe(),
        "threads": args.threads,
        "rounds": args.rounds,
        "batch_invariant": args.batch_invariant,
        "torch": torch.__version__,
        "model": {"model_type": args.family} | SHAPES[args.family],
        "figures": figures,
    }
    print(f"{device.describe()}, {args.threads} thread(s), median of {args.rounds} alternating rounds, tokens/s")
    print(f"{'':8}{'engine':>10}{'generate':>10}{'ratio':>8}{'target':>8}{'floor':>10}")
    for name, f in figures.items():
        print(
            f"{name:8}{f['engine_tokens_per_s']:10.0f}{f['hf_tokens_per_s']:10.0f}{f['ratio_to_hf']:8.2f}"
            f"{TARGETS[args.family][name]:8.1f}{f['floor_tokens_per_s']:10.0f}   "
            f"({f['hf_useful_share']:.0%} of generate's slots useful)"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
