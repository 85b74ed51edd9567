"""Measure, in a real run of a tiny model, the memory of its processes and the bytes of its folder.

A run as `scripts/train.py` starts it writes a line per step: `memory`: resident anonymous bytes of each process of the
run; `folder`: bytes of the run's folder without checkpoints, model and logs; `time`: seconds of a clock that all
processes share. The floor of the memory of Ray's own processes is that of a Ray without any work beside the run; that
of the queue an actor of it which answers as many calls as the queue, and keeps nothing.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import ROOT, Arguments, Figures
from benchmarks.runs import temporary_folder, train
from distqueue.actor import MAX_CALLS
from tests.chaos.space import anonymous_bytes
from tests.helpers import MINIMAL, runnable_checkpoint

OPTIONS = """device=emulated cluster.npus=2 parallel=single data=addition data.max_prompt_length=8
data.prompts_per_step=8 rollout.sampling.forced_median=6 algorithm.group_size=4 fusion=hybrid stalesync.max_staleness=1
rollout.max_response_length=24 rollout.schedule.chunk_tokens=4 rollout.kv_pool.suspended=pool
rollout.drafts.source=both reward.max_failed_share=1 run.save_every=20 eval.every=20 run.eval_prompts=16""".split()
"""A run that suspends, drafts, saves and evaluates: whatever may hold memory"""
SETTLED = 100
"""Step behind which memory must not grow"""
CALLS_A_SECOND, PAYLOAD = 100, bytes(2000)
"""About the calls of the queue's actor while the run steps twice a second, and what such a call sends"""
WAIT_S, STEP_S = 900, 5
"""Seconds a run may take; a step may take in a longer one"""
Record = dict[str, Any]
Growth = dict[str, tuple[float, float]]
"""Mean memory of a process over a tenth of the steps behind a step, and over the last tenth; of those that live all the
time between"""


def memory(args: Arguments) -> Figures:
    first = min(SETTLED, args.steps // 2)
    with temporary_folder() as folder:
        runnable_checkpoint(folder / "model", **MINIMAL)
        with idle_ray(folder / "idle.jsonl"):
            code = "from benchmarks.growth_run import observed_run; observed_run()"
            options = [*OPTIONS, f"model.path={folder / 'model'}", f"run.steps={args.steps}"]
            command = [sys.executable, "-c", code, str(folder / "record.jsonl")]
            train(folder / "home", options, command=command, timeout_s=max(WAIT_S, STEP_S * args.steps))
        records, idle = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("record", "idle")
        )
    of_ray = ("gcs", "raylet", "ray::Echo")
    floor = {f"idle {n}": s for n, s in growth_of_floor(idle, records, first).items() if n.split()[0] in of_ray}
    sizes = growth_of_memory(records, first) | floor
    figures: Figures = {}
    for name, (before, after) in sizes.items():
        kind = "floor" if name in floor else "growth"
        figures[name] = {"before_mb": before / 1e6, "after_mb": after / 1e6, kind: after / before - 1}
    written = records[-1]["folder"] - records[first - 1]["folder"]
    return figures | {"folder_bytes_a_step": written / (len(records) - first)}


def growth_of_memory(records: list[Record], first: int) -> Growth:
    """Return the growth of each process of a run behind step ``first``."""
    tenth, series = max(1, len(records) // 10), [one["memory"] for one in records[first:]]
    return _growth(series, series[:tenth], series[-tenth:])


def growth_of_floor(idle: list[Record], records: list[Record], first: int) -> Growth:
    """Return the same of the processes of an idle Ray, in the time of these steps; {}: they were too short."""
    tenth, times = max(1, len(records) // 10), [one["time"] for one in records[first:]]
    spans = [(part[0], part[-1]) for part in (times[:tenth], times[-tenth:])]
    parts = [[one["memory"] for one in idle if begin <= one["time"] <= end] for begin, end in spans]
    return _growth(parts[0] + parts[1], *parts) if all(parts) else {}


def _growth(series: list[dict[str, int]], *parts: list[dict[str, int]]) -> Growth:
    lasting = [name for name in series[0] if all(name in sizes for sizes in series)]
    before, after = ({name: mean(sizes[name] for sizes in part) for name in lasting} for part in parts)
    return {name: (before[name], after[name]) for name in lasting}


@contextmanager
def idle_ray(record: Path) -> Iterator[None]:
    """Keep a Ray without any work beside the block, and a file with a line of its memory each second."""
    command = [sys.executable, "-c", "from benchmarks.growth_run import observe_idle; observe_idle()"]
    with record.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out)
    try:
        yield
    finally:
        process.communicate()


def observe_idle() -> None:
    """Start a Ray as a run does, and print the memory of its processes each second until the standard input ends.
    Meanwhile an actor answers calls."""
    from select import select

    import ray

    from stalesync.process.ray_cluster import ray_cluster

    class Echo:
        async def answer(self, payload: bytes) -> bytes:
            return payload

    with ray_cluster(None):
        echo = ray.remote(Echo).options(num_cpus=0, max_concurrency=MAX_CALLS).remote()
        while not select([sys.stdin], [], [], 1.0)[0]:
            ray.get([echo.answer.remote(PAYLOAD) for _ in range(CALLS_A_SECOND)])
            print(json.dumps({"memory": anonymous_bytes(), "time": time.monotonic()}), flush=True)


def observed_run() -> None:
    """Run `scripts/train.py` in this process, whose first argument is the record and the others are overrides; its
    controller writes a line of the record after each step."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import train as script

    from stalesync.loop.controller import Controller

    train_step, record = Controller.train_step, sys.argv.pop(1)

    def recorded_step(self: Controller) -> None:
        train_step(self)
        line = {"memory": anonymous_bytes(), "folder": _folder_bytes(self.folder.path), "time": time.monotonic()}
        with open(record, "a") as file:
            print(json.dumps(line), file=file)

    Controller.train_step = recorded_step  # type: ignore[method-assign]
    script.main()


def _folder_bytes(folder: Path) -> int:
    apart = {"checkpoints", "hf", "logs"}
    tops = [path for path in folder.iterdir() if path.name not in apart]  # checkpoints are removed meanwhile
    files = (path for top in tops for path in [top, *top.rglob("*")] if path.is_file())
    return sum(path.stat().st_size for path in files)
