"""Measure the KV pool: a request that moves between two engines by copying, on one machine and between two, against
prefilling it again.

    python benchmarks/kv_pool.py [--tokens 1024] [--json PATH]

park: the request leaves the first engine, its KV is copied to a file. pull: from the submission to the second engine
until its next token is sampled; of that, fetch: reading and verifying the file. prefill: the same where all tokens are
computed again. step: a decode step of this request, without which no engine continues it. remote_pull, remote_fetch:
the same where the file is on another node of a Ray cluster, both on this machine: the bytes pass between the stores of
two raylets over loopback. Floors: memcpy of as many bytes, a TCP connection over loopback (wire), and their checksum. A
small dense model on one emulated card; median of the repeats.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.kv_pool_engines:measure"},
    [
        Option("tokens", 1024, smoke=64, help="of the prompt"),
        Option("repeats", 9, smoke=1),
        Option("layers", 8, smoke=1),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
