"""Measure training adapters (LoRA) against training all weights: what is sent, HBM, and the time of each part.

    python benchmarks/lora.py --json lora.json [--rank 16] [--rounds 5]

switch     two cards train, two others generate: bytes that they receive, and bytes of the adapters that they hold;
           four cards that train and generate in two layouts: time of both ways over that without adapters
hbm, step  one card: HBM of a training step, and its time, over those of training all weights
decode     one card: time of generating 64 sequences, over that without adapters

A Qwen3-MoE of 89M parameters (fp32) on emulated NPUs, one process and one thread a card; all matrices have adapters.
Both sides run in turns; ratios are those of medians.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.lora_sides:measure"},
    [
        Option("rank", 16, smoke=2, help="of the adapters"),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("layers", 8, smoke=2),
        Option("hidden", 512, smoke=64),
        Option("tokens", 256, smoke=32),
    ],
    {
        "switch.sent_over_adapters": "<= 1.01",
        "switch.ratio": "<= 1.1",
        "hbm.ratio": "<= 0.45",
        "step.ratio": "<= 1.1",
        "decode.ratio": "<= 1.3",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
