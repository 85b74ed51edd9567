"""Measure how the costs of a run grow: with groups, samples, sequences, lengths and steps.

controller: CPU of the whole controller per group of 8 samples, at 64 to 16,384 groups a step; cards and queue only hold
names, 64 engines of 256 sequences (`tests/stalesync/loop/named_cards.py`). queue: samples per second of puts, gets and
acks while 10k to 1M are held, and bytes a sample. decode: the host's part of a decode step at 1 to 1,024 sequences:
scheduler, batch, noise, sampler and bookkeeping; the engine is real, its model computes nothing, so what is left of a
step is everything but the model's own operations. lengths: CPU of the host, and bytes, of a token by the length of its
sample. rows: the same of the queue's processes, of a row in memory, spilled, journalled and in a checkpoint. memory: of
each process of a run that suspends, drafts, saves and evaluates, beside its floor, a Ray without any work; and bytes of
its folder: means of a tenth of the steps behind step 100, or half of them, and at the end.

Times are CPU times. How much longer this machine computes than the reference machine (`tests/machine.py`) is measured
beside each; figures and targets are of the reference machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option

BENCHMARK = Benchmark(
    __doc__,
    {
        "controller": "benchmarks.growth_cpu:controller",
        "queue": "benchmarks.growth_cpu:queue",
        "decode": "benchmarks.growth_cpu:decode",
        "lengths": "benchmarks.growth_lengths:lengths",
        "rows": "benchmarks.growth_rows:rows",
        "memory": "benchmarks.growth_run:memory",
    },
    [
        Option("steps", 1000, smoke=6, help="of the run whose memory is measured"),
        Option("decode_steps", 60, smoke=2, help="of `decode`"),
        Option("device", "cpu", help="of `decode`: cpu, or a kind of fusion.npu: emulated, …"),
        Option("groups", (64, 256, 1024, 4096, 16384), smoke=(16, 64)),
        Option("min_groups", 8192, smoke=64),
        Option("rounds", 3, smoke=1),
        Option("held", (10_000, 100_000, 1_000_000), smoke=(1_000, 5_000)),
        Option("batch", 4096, smoke=512),
        Option("sequences", (1, 8, 64, 256, 1024), smoke=(1, 8, 64)),
        Option("lengths", (1024, 16_384, 131_072), smoke=(64, 128), help="tokens of a sample in `lengths`, `rows`"),
    ],
    {
        "controller.*.us_a_group": "<= 50",
        "decode.us_at_64": "<= 1000",
        "decode.us_a_sequence": "<= 4",
        "memory.*.growth": "<= 0.02",
        "lengths.growth.*": "<= 0.5",
        "rows.growth.*": "<= 0.5",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
