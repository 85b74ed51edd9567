"""Measure drafts: how many tokens a forward pass yields, and whether that pays.

engines: what a model says to the prompts of the long-answer task in two epochs, 16 responses a prompt, temperature 1,
replayed on 1, 2 and 4 engines, with the exchange of text and without (drafts change nothing that is sampled): siblings
of a group divided over the engines, which together decode four of them at a time; history of a group that another
engine had in the last epoch; both. Bytes sent and received a token, CPU microseconds of an engine a step, and of the
store a token.

texts (with --texts FILE): tokens that a forward pass yields for recorded texts of a model, rows {"prompt": …,
"samples": […, …]}, through the drafter itself, which learns from what is accepted how sure a token must be: from
siblings side by side, from history, and from both. The first half of a problem's samples are its responses, the others
those of the epoch before.
`held_out`: problems that served no choice of a constant of the drafter, those whose prompt has an odd digest; `tuned`:
the others. The tokenizer is a byte-level BPE of 8,192 tokens made of the texts, or --tokenizer.

real: tokens a second of a 52M-parameter model with drafts and without, in turns, at 1 to 32 running
sequences; eight earlier responses to each prompt are known, which differ from it in a tenth of their tokens. small: the
same of the long-answer model, whose steps take about a millisecond, over three epochs; also where no text repeats, so
that drafts only cost time. paced: whole runs at staleness 0 on eight emulated cards that take the time of 910C dies
under OLMoE-1B-7B, with the long-answer task: seconds of a step and of its tail (in which at most a tenth of its samples
is still generated) without drafts, with drafts, and with drafts and a probe in every group. A step is the same work on
every side; steps in which a card was late on any side are left out on all.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option


def check(args: Namespace) -> str:
    if args.texts and "texts" not in args.parts:
        return "--texts has an effect with --only texts"
    return "--only texts needs --texts" if "texts" in args.parts and not (args.texts or args.smoke) else ""


BENCHMARK = Benchmark(
    __doc__,
    {
        "engines": "benchmarks.drafts_text:engines",
        "texts": "benchmarks.drafts_text:texts",
        "real": "benchmarks.drafts_decode:real",
        "small": "benchmarks.drafts_decode:small",
        "paced": "benchmarks.drafts_decode:paced",
    },
    [
        Option("model", None, help="folder of a base model of worked_arithmetic (default: make one)"),
        Option("texts", None, help="of `texts`: recorded texts"),
        Option("tokenizer", None, help="folder of the tokenizer of --texts"),
        Option("prompts", 16, smoke=2, help="of `engines`"),
        Option("rounds", 3, smoke=1, help="of `real`, `small`"),
        Option("base", "", smoke="0"),
        Option("layers", 8, smoke=1),
        Option("live", (1, 2, 4, 8, 32), smoke=(1, 2)),
        Option("new_tokens", 128, smoke=8),
        Option("small_prompts", 64, smoke=2),
        Option("cards", 8, smoke=1),
        Option("paced_prompts", 64, smoke=2),
        Option("speed", 4.8, smoke=200.0),
    ],
    {
        "texts.held_out.both.tokens_per_forward": ">= 2.4",
        "real.[124].ratio": ">= 1.8",
        "real.[124].accepted": ">= 3.5",
        "real.32.ratio": ">= 0.95",
        "small.*.ratio": ">= 0.95",
        "paced.all.ratio": ">= 1.5",
    },
    default=("engines", "real", "small", "paced"),
    check=check,
)

if __name__ == "__main__":
    BENCHMARK.main()
