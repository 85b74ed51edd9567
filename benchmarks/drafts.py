"""Measure drafts: how many tokens a forward pass yields, and whether that pays.

    python benchmarks/drafts.py --json drafts.json                (about 25 minutes on two cores)
    python benchmarks/drafts.py --only server,text                or real, small, paced
    python benchmarks/drafts.py --only text --texts FILE.jsonl --tokenizer FOLDER
                                                                  rows {"group": …, "response": …}

server: microseconds to index a token and to draft 8, inside C++, and bytes a token. text: tokens that a forward pass
yields for the long-answer task over two epochs, 16 responses a prompt, temperature 1: without drafts, from siblings
side by side, behind a probe, four at a time, from history (also where a response that has earned a reward counts four
times), and from both. Drafts change nothing that is sampled, so the
responses are generated once and every order is replayed on them. engines: the same responses on 1, 2 and 4 engines,
with the exchange of text and without: siblings of a group divided over the engines, which together decode four of them
at a time; history of a group that another engine had in the last epoch; both. Bytes sent and received a token, CPU
microseconds of an engine a step, and of the store a token. real: tokens a second of a 52M-parameter model with drafts
(both budgets) and without, in turns, at 1 to 32 running sequences; eight earlier responses to each prompt are known,
which differ from it in a tenth of their tokens. small: the same of the long-answer model, whose steps take about a
millisecond, over three epochs; also where no text repeats, so that drafts only cost time. paced: whole runs at
staleness 0 on eight emulated cards that take the time of 910C dies under OLMoE-1B-7B, with the long-answer task:
seconds of a step and of its tail (in which at most a tenth of its samples is still generated) without drafts, with
drafts, and with drafts and a probe in every group.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PARTS = ("server", "text", "engines", "real", "small", "paced")

TARGETS = {
    "server.insert_us": ("at most", 1.0),
    "server.draft_us": ("at most", 5.0),
    "server.bytes_per_token": ("at most", 120.0),
    "text.probe.tokens_per_forward": ("at least", 2.4),
    "text.history.tokens_per_forward": ("at least", 4.0),
    **{f"real.{live}.ratio": ("at least", 1.8) for live in (1, 2, 4)},
    **{f"real.{live}.accepted": ("at least", 3.5) for live in (1, 2, 4)},
    "real.32.ratio": ("at least", 0.95),
    **{f"small.{case}.ratio": ("at least", 0.95) for case in ("8", "64", "64_unlike")},
    "paced.ratio": ("at least", 1.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--model", type=Path, help="of `text`, `small`, `paced`: a base model of worked_arithmetic (default: make one)"
    )
    parser.add_argument("--texts", type=Path, help="of `text`: responses to replay instead")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of --texts")
    parser.add_argument("--prompts", type=int, default=16, help="of `text`")
    parser.add_argument("--rounds", type=int, default=3, help="of `real`, `small`")
    args = parser.parse_args()
    names = list(PARTS) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.texts and not args.tokenizer:
        parser.error("--texts needs --tokenizer")

    import torch  # only now: --help must not wait for torch

    from benchmarks import drafts_engines, drafts_paced, drafts_sides, drafts_small

    torch.set_num_threads(1)
    modules = {"engines": drafts_engines, "small": drafts_small, "paced": drafts_paced}
    parts = {name: getattr(modules.get(name, drafts_sides), name) for name in names}
    figures: dict[str, Any] = {name: part(args) for name, part in parts.items()}
    lines = checked(figures)
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "checked": lines}, indent=2) + "\n")


def checked(figures: dict[str, Any]) -> list[str]:
    """Return a line for each target that was measured, and whether it was met."""
    lines = []
    for name, (relation, bound) in TARGETS.items():
        value: Any = figures
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            met = value <= bound if relation == "at most" else value >= bound
            lines.append(f"{'ok    ' if met else 'MISSED'} {name}: {value:.3g}, target {relation} {bound:g}")
    return lines


if __name__ == "__main__":
    main()
