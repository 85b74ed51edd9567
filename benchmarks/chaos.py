"""Kill processes of runs at random moments, and check what the runs leave.

    python benchmarks/chaos.py [--minutes 30] [--seed 0] [--jobs 2] [--kills N] [--json PATH]
    python benchmarks/chaos.py --only start [--every 0.05] [--until 6] [--victim NAME]

Runs of a tiny model are started as a user starts them, in every deployment at staleness 0, 1 and 2, and something is
killed in each: the controller (SIGKILL, SIGTERM, SIGINT), a worker, the queue, a shard of it, Ray's raylet or GCS, a
reward process; or the disk or the shared memory becomes full. A disk that is full between two checkpoints must only
stop the run's logs, with a warning, until there is space again. The model of every third run speaks in several turns
with an environment, whose processes are killed in place of those of a reward. The run is resumed, killed again, and so
on; the last start goes to its end. What is killed when is drawn from the seed (`tests/chaos/plan.py`).

After each kill the run must end, or go on where it survives, within 1.5 times the time in which it starts on this
machine under its present load (else `late`); its message must name what was killed, for a worker with rank and stage
(`unnamed`); and no process, segment of shared memory or temporary file may be left over, and no checkpoint count as
complete that is not (`left_over`). A run that goes on without a worker, because its engine is replaced, counts as
`mended`; its controller is killed then. After a chain, its folder must show every group ended once (`lost`, `twice`)
at an age within the bound (`too_old`), and at staleness 0 the metrics and final weights of a run that was not
disturbed, to the bit (`not_bitwise`; of a step in which an engine was replaced, without what engines count);
`not_finished` counts chains whose last start failed. Where groups are in progress after a kill, the run is first
resumed under another setting, which must be refused by key and change no file (`not_refused`). Between two starts a
file beside the checkpoint is damaged: a resume must name it (`unnamed_flips`), and the run must end as if it had not
been, apart from rows that were dropped. A chain in which a reward process was killed while it scored a sample is not
compared: that sample is not trained.

Exit status 1 if any of these but `late` is not 0. Needs root or user namespaces (`tests/chaos/space.py`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

FAULTS = "lost twice too_old not_bitwise not_finished not_refused unnamed_flips left_over unnamed traced".split()

BENCHMARK = Benchmark(
    __doc__,
    {"chains": "tests.chaos.account:chains", "start": "tests.chaos.start:measure"},
    [
        Option("minutes", 30.0, smoke=2.0, help="minutes after which nothing more is killed"),
        Option("seed", 0, help="determines what is killed in which run, and when"),
        Option("jobs", 2, smoke=1, help="number of chains that run at a time"),
        Option("chain", -1, smoke=0, help="run this chain of the seed again and again, instead of all"),
        Option("kills", 1 << 20, smoke=1, help="end after this many kills"),
        Option("interpreters", False, help="start an interpreter for every process, instead of forking it"),
        Option("signals", "SIGINT,SIGTERM", smoke="SIGTERM", help="of `start`: to the controller"),
        Option("victim", "controller", help="of `start`: or raylet, gcs, queue, worker, shared memory, disk"),
        Option("first", 0.0, smoke=1.0, help="of `start`: seconds of the first moment"),
        Option("until", 6.0, smoke=1.0, help="of `start`: seconds of the last one"),
        Option("every", 0.05, help="of `start`: seconds between two"),
    ],
    {f"*.{fault}": "<= 0" for fault in FAULTS},
    default=("chains",),
    must_hold=True,
)

if __name__ == "__main__":
    BENCHMARK.main()
