"""Kill processes of runs at random moments, and check what the runs leave.

Runs of a tiny model are started as a user starts them, in every deployment at staleness 0, 1 and 2, killed, resumed,
killed again, and so on; the last start goes to its end. What is killed or becomes full when is drawn from the seed
(`tests/chaos/plan.py`, docs/stalesync.md#failures).

After each kill the run must end, or go on where it survives, within 1.5 times the time in which it starts under the
present load (else `late`); name what was killed, a worker with rank and stage (`unnamed`); and leave nothing over, nor
a checkpoint that counts as complete and is not (`left_over`). After a chain, every group must have ended once (`lost`,
`twice`) at an age within the bound (`too_old`), and at staleness 0 metrics and final weights be those of a run that was
not disturbed, to the bit (`not_bitwise`, but for steps in which an engine was replaced, and chains in which a reward
process was killed while it scored). `not_finished`: chains whose last start failed. A resume under a setting that
groups in progress cannot bear must be refused by key (`not_refused`), and a damaged file be named (`unnamed_flips`).

Exit status 1 if any of these but `late` is not 0. Needs root or user namespaces (`tests/chaos/space.py`).
"""

from benchmarks.harness import Benchmark, Option

FAULTS = "lost twice too_old not_bitwise not_finished not_refused unnamed_flips left_over unnamed traced".split()

BENCHMARK = Benchmark(
    __doc__,
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
    ", ".join(f"*.{fault} <= 0" for fault in FAULTS),
    parts={"chains": "tests.chaos.account:chains", "start": "tests.chaos.start:measure"},
    default=("chains",),
    must_hold=True,
)
BENCHMARK.run_as(__name__)
