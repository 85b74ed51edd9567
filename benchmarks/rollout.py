"""Measure how requests are scheduled on engines.

    python benchmarks/rollout.py --json rollout.json             (about an hour on two cores)
    python benchmarks/rollout.py --only paced --steps 2

paced: one step's requests on eight emulated cards of modelled speed, four engines, in every order of
`fusion/rollout/orders`: modelled tokens per second of generation, seconds of its tail (in which at most a tenth of
the samples is left), and speed relative to `oracle`, which knows every length (`rollout_paced.py`).

orders: every order in virtual time, on three workloads, with and without runaways (`rollout_orders.py`).

replay: three published rollouts in virtual time, from whole responses to drafts of siblings and history, with every
published ratio beside ours (`rollout_replay.py`, constants in `rollout_workloads.py`).

rhyme: RhymeRL's ablation in virtual time, from synchronous steps to HistoPipe and drafts of the last epoch, with every
published ratio beside ours (`rollout_rhyme.py`).

scale: linearity of Pangu 718B on 1, 4 and 16 supernodes at staleness 0, 1 and 2 (`rollout_scale.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TARGETS = {"ratio_to_oracle": 0.92, "ratio_to_fifo": 1.25}
"""Lower bounds for the default order; that over `fifo` where there are runaways"""


def paced(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import rollout_paced
    from fusion.inference.config import RolloutConfig

    figures = rollout_paced.paced(args)
    chosen = RolloutConfig().order
    for line in rollout_paced.invalid(figures):
        print(f"INVALID: {line}")
    for lengths in rollout_paced.LENGTHS:
        ratio = figures[lengths][chosen]["ratio_to_oracle"]
        if ratio < TARGETS["ratio_to_oracle"]:
            print(f"MISSED: {lengths}: {chosen} reaches {ratio:.3f} of oracle, target {TARGETS['ratio_to_oracle']}")
    ratio = figures["runaways"][chosen]["ratio_to_fifo"]
    if ratio < TARGETS["ratio_to_fifo"]:
        print(f"MISSED: runaways: {chosen} is {ratio:.3f} x as fast as fifo, target {TARGETS['ratio_to_fifo']}")
    return figures


def orders(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import rollout_orders
    from fusion.inference.config import RolloutConfig

    figures = rollout_orders.orders(args)
    return _checked(figures, rollout_orders.misses(figures, RolloutConfig().order))


def replay(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import rollout_replay

    figures = rollout_replay.replay(args)
    return _checked(figures, rollout_replay.misses(figures))


def rhyme(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import rollout_rhyme

    figures = rollout_rhyme.rhyme(args)
    return _checked(figures, rollout_rhyme.misses(figures))


def scale(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import rollout_scale

    figures = rollout_scale.scale(args)
    return _checked(figures, rollout_scale.misses(figures))


def _checked(figures: dict[str, Any], misses: Iterable[str]) -> dict[str, Any]:
    """Prints the missed targets; returns the figures."""
    for line in misses:
        print(f"MISSED: {line}")
    return figures


PARTS = {"paced": paced, "orders": orders, "replay": replay, "rhyme": rhyme, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run of `paced`")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of `orders`, `replay` and `rhyme`")
    parser.add_argument("--first-seed", type=int, default=1, help="first seed of `rhyme`")
    parser.add_argument("--workloads", default="moonlight,qwen2_vl_72b,kimi_k2", help="of `replay`")
    parser.add_argument("--supernodes", default="1,4,16", help="of `scale`")
    parser.add_argument("--scale-steps", type=int, default=10, help="steps of each run of `scale`")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only={args.only}: no part {unknown[0]!r}; expected {', '.join(PARTS)}")
    figures = {name: PARTS[name](args) for name in names}
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
