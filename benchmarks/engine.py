"""Measure the engine against transformers' `generate` on one MoE checkpoint, and against its matrix products alone.

    python benchmarks/engine.py --json engine.json [--family qwen3_moe] [--rounds 5] [--threads 1] [--device cpu]

qwen3_moe: grouped-query attention. deepseek_v3: latent attention of the same hidden size, layers and experts.

equal: 64 sequences of 64 new tokens. ragged: 256 sequences of up to 256 new tokens that end at a stop token. Both
sides sample at temperature 1 from the same weights and prompts; the engine also returns logprobs. Only useful tokens
count: those that a batch computes after a sequence has ended do not. Every round runs all sides, in rotating order;
figures are medians, and the ratio is that of the medians. The floor repeats the products with weight matrices of the
engine's steps, with the same numbers of rows and evenly loaded experts, and nothing else (no attention).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.engine_sides:measure"},
    [
        Option("family", "qwen3_moe", help="the model's family", choices=("qwen3_moe", "deepseek_v3")),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("threads", 1, help="of both sides"),
        Option("device", "cpu", help="cpu, or a kind of fusion.npu: auto, emulated, …"),
        Option("batch_invariant", False, help="rollout.engine.batch_invariant=true"),
        Option("part_of_a_case", 1, smoke=16),
    ],
    {
        "qwen3_moe.equal.ratio_to_hf": ">= 1.5",
        "qwen3_moe.ragged.ratio_to_hf": ">= 3.5",
        "deepseek_v3.equal.ratio_to_hf": ">= 1.0",
        "deepseek_v3.ragged.ratio_to_hf": ">= 2.5",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
