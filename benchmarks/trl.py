"""Compare a whole run with TRL's GRPOTrainer: seconds a step, and seconds until the reward reaches 0.9.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements/trl.txt
    python benchmarks/trl.py --trl .venv-trl/bin/python --json trl.json [--rounds 3] [--threads 1] [KEY=VALUE …]

The task of the quickstart on one card: same base model, prompts in the same order, 64 prompts x 8 samples of at most 5
tokens, all generated at once, two minibatches, KL to the reference, optimizer and number of threads. rlfusion runs on
one emulated card, with Ray, queue and switches; TRL in one process on the plain CPU. Every round runs both sides, in
rotating order, each until the mean reward of five steps reaches 0.9. A step's time is that between two rows of
metrics.jsonl, so it holds all that a run does; a round's figure is the median of its steps, the ratio that of the
medians of the rounds. --smoke runs rlfusion's side alone where TRL is not installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.trl_side:measure"},
    [
        Option("trl", sys.executable, help="interpreter that has TRL"),
        Option("rounds", 3, smoke=1, help="rounds that are measured"),
        Option("steps", 120, smoke=4, help="maximum number of steps of a run"),
        Option("threads", 1, help="of both sides"),
        Option("prompts", 64, smoke=8),
        Option("target", "", smoke="0"),
    ],
    {"step_ratio": ">= 1.5"},
    extra="config overrides of rlfusion's side",
)

if __name__ == "__main__":
    BENCHMARK.main()
