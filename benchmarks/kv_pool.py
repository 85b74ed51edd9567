"""Measure the KV pool: a request that moves between two engines by copying, on one machine and between two, against
prefilling it again.

    python benchmarks/kv_pool.py [--tokens 1024] [--only requests,prompts] [--json PATH]

requests. park: the request leaves the first engine, its KV is copied to a file. pull: from the submission to the second
engine until its next token is sampled; of that, fetch: reading and verifying the file. prefill: the same where all
tokens are computed again. step: a decode step of this request, without which no engine continues it. remote_pull,
remote_fetch: the same where the file is on another node of a Ray cluster, both on this machine: the bytes pass between
the stores of two raylets over loopback. Floors: memcpy of as many bytes, a TCP connection over loopback (wire), and
their checksum.

prompts. A prompt that one engine has computed and another finds in the pool; a token has as much KV as one of
Qwen2.5-7B, 56 KiB. hit: what the thread that steps the engine spends on it, from the orders of a step to the blocks in
its cache; whole: with what it waits meanwhile, until the file is read and verified; in turns with a memcpy of as many
bytes. cpu: of that thread, which other processes' load changes less. first_token: from the submission; prefill: the
same where the prompt is computed.

A small dense model on one emulated card; median of the repeats.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"requests": "benchmarks.kv_pool_engines:measure", "prompts": "benchmarks.kv_pool_engines:share_prompts"},
    [
        Option("tokens", 1024, smoke=64, help="of the prompt"),
        Option("repeats", 9, smoke=1),
        Option("layers", 8, smoke=1),
        Option("prompt_layers", 28, smoke=1),
    ],
    {"prompts.hit_over_memcpy": "<= 1.5"},
)

if __name__ == "__main__":
    BENCHMARK.main()
