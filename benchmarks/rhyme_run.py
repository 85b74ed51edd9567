"""Train three epochs with drafts from history and siblings (RhymeRL, arXiv 2508.18588) and without, in wall clock.

    python benchmarks/rhyme_run.py --json rhyme_run.json [--rounds 2] [--base FOLDER]

A MoE of 26M parameters, of which 6M compute a token, is warmed up on sums with every step written out; then whole runs
of both sides train it by GRPO, in turns: staleness 0, `batch_invariant`, two emulated cards with an engine of at most
four sequences each, where decoding is bound by the weights that it reads, as on a card. Every step's samples must be
equal token for token. Figures are of the epochs behind the first, medians over the steps of all rounds:

    generation_ratio    seconds of generation without drafts over those with
    step_ratio          … of steps; at least 0.95 / (1 - share + share / 1.8), and 1.2
    share               share of generation in a step without drafts
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.rhyme_run_sides:measure"},
    [
        Option("rounds", 2, smoke=1, help="runs of each side"),
        Option("base", "", help="folder of a base model made earlier; default: make one, which takes minutes"),
        Option("prompts", 4, smoke=2),
        Option("steps_of_epoch", 4, smoke=1),
        Option("target", "", smoke="0"),
        Option("hidden", 384, smoke=64),
    ],
    {
        "both.generation_ratio": ">= 1.8",
        "both.step_ratio": ">= 1.2",
        "both.step_ratio_over_expected": ">= 0.95",
        "both.equal_samples": ">= 1",
    },
    extra="config overrides of both sides",
)

if __name__ == "__main__":
    BENCHMARK.main()
