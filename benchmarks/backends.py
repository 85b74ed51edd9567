"""Compare the backends: engines, and whole runs of all combinations of trainer and engine.

    python benchmarks/backends.py --json backends.json [--only engines,runs] [--rounds 5]

In an environment with Megatron-Core and vLLM (bash scripts/environment.sh --backend vllm).

A Qwen3-MoE of 25M parameters (fp32), one process and one thread a card or side. Sides take turns in rotating order;
figures are medians, the first round warms up. What is not installed is not measured.

engines: on one card, tokens a second for the same requests.

    embedded     this project's engine
    vllm         rollout.backend=vllm: vLLM's scheduler and model with our control channel, sampler and memory
    vllm_plain   vLLM's own engine in one process, with its sampler and log-probabilities of sampled tokens, computing
                 from plain weight tensors as ours does (vllm_host.py): what control channel, sampler and memory cost
    vllm_alone   the same as installed: with packed copies of its weights, which a switch could not write

runs: four emulated NPUs, trained in TP2 x EP2, generating in EP4, colocated at staleness 0. All runs have the same
weights, prompts and forced lengths, so that they generate and train as many tokens. `peak_extra_buckets`: how far
weights and buffers of a switch exceed the larger of the two layouts.
"""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {
        "engines": "benchmarks.backends_engines:engines",
        "runs": "benchmarks.backends_engines:runs",
    },
    [
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("dtype", "float32", help="of `engines`", choices=("float32", "bfloat16")),
        Option("steps", 5, smoke=1, help="of `runs`: measured steps of a run"),
        Option("requests", 96, smoke=8),
        Option("layers", 4, smoke=2),
        Option("combinations", 4, smoke=1),
    ],
    {"engines.*.over_vllm": ">= 0.9"},
)

SHAPE = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=224,
    tie_word_embeddings=False,
    initializer_range=0.05,
)

if __name__ == "__main__":
    BENCHMARK.main()
