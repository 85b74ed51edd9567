"""Measure DistQueue against its floor and its peers, and what its processes cost.

    python benchmarks/distqueue.py --json PATH [--only transfer,processes] [--rounds 15]

transfer: one process puts, another gets; medians over alternating rounds. `long`, 512 samples of lognormal lengths
(mean about 5.6k, at most 32k); `short`, 8,192 samples of 10 to 300 tokens; five columns of 4 bytes per token each.
`starved`: a put, get and ack of a small sample, alone and beside blocked readers.

    put_s, get_s        this queue; a get ends when the reader owns a copy of every byte
    put_sums_s, …       the part of it that computes checksums; get_sums_s: that verifies them
    hash_s              floor of both: xxh3 of the same bytes, one call per column
    copy_s              floor: np.copyto of the same bytes into warm memory
    call_s              floor: an empty call to an actor like the queue's; a put here is one call, ray.put is none
    ray_*               ray.put / ray.get of the same packed arrays, with the copy into warm memory
    transferqueue_*     TransferQueue 0.1.11 with its default storage, where it can be imported: it pins its
                        requirements, so use an environment with it, torch, numpy, ray, lazy_loader, xxhash, safetensors
    padded_bytes        size with every sample padded to the longest; payload_bytes: the samples themselves
    sent_bytes          bytes this queue sends for a put, metadata included, counted at the sender; received_bytes: for
                        a get

processes: the queue's actor and the shard of a node, against an actor of Ray that does nothing (idle): user and system
seconds until it serves calls, resident memory after some puts, gets and acks, and what no other process shares of it.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402


def check(args: Namespace) -> str:
    useless = "rounds" in args.given and "transfer" not in args.parts
    return f"--rounds has no effect with --only {','.join(args.parts)}: it is of the transfer" if useless else ""


BENCHMARK = Benchmark(
    __doc__,
    {"transfer": "benchmarks.distqueue_transfer:measure", "processes": "benchmarks.distqueue_transfer:processes"},
    [
        Option("rounds", 15, smoke=1, help="rounds of the transfer"),
        Option("samples", 1, smoke=64),
        Option("readers", 512, smoke=4),
        Option("trips", 50, smoke=2),
        Option("starts", 5, smoke=1),
    ],
    check=check,
)

if __name__ == "__main__":
    BENCHMARK.main()
