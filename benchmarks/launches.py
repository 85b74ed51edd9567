"""Count what a card's operators cost beside their arithmetic, on the emulated NPU: no card is needed.

    python benchmarks/launches.py --json launches.json

logprobs: peak bytes of log-probabilities and entropies with their gradients, of one micro-batch in bfloat16, from the
allocator: beyond the hidden states, the head and the gradients of both. planned_bytes: the cost model's estimate of
these. whole_bytes: what whole logits would take, at 18 bytes each. The hidden size, which changes none of them, is
small.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"logprobs": "benchmarks.launches_logprobs:peak"},
    [
        Option("rows", 16384, smoke=512, help="tokens of the micro-batch"),
        Option("ids", 151936, smoke=8192, help="ids of the vocabulary, on one card"),
        Option("channels", 16, help="hidden size"),
    ],
    {"logprobs.peak_bytes": "<= 2e9"},
)

if __name__ == "__main__":
    BENCHMARK.main()
