"""Count, in a real run of a tiny model, the controller's calls of Ray, memory of its processes and bytes of its folder.

The run is one as `scripts/train.py` starts it, and writes a line per step. `calls`: calls of actors by method that the
controller made in the step; `memory`: resident anonymous bytes of each process of the run; `folder`: bytes of the run's
folder without checkpoints, model and logs; `time`: seconds of a clock that all processes share.

The floor of the memory of Ray's own processes is that of a Ray without any work, started beside the run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.chaos_space import victim_of  # noqa: E402

SMALL = [
    "device=emulated",
    "data=addition",
    "data.max_prompt_length=8",
    "rollout.max_response_length=8",
    "rollout.forced_median=6",
    "algorithm.group_size=4",
    "run.eval_prompts=0",
    "run.name=run",
    "parallel=single",
]
WHOLE = [
    "fusion=hybrid",
    "stalesync.max_staleness=1",
    "rollout.max_response_length=24",
    "rollout.chunk_tokens=4",
    "rollout.suspended_kv=pool",
    "rollout.drafts=both",
    "reward.max_failed_share=1",
    "run.save_every=20",
    "eval.every=20",
    "run.eval_prompts=16",
]
"""A run that suspends, drafts, saves and evaluates: whatever may hold memory"""
WAIT_S = 900
STEP_S = 5
"""Seconds a step may take in a run that is longer than `WAIT_S`"""


def run(folder: Path, *, cards: int, prompts: int, steps: int, others: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run ``steps`` steps of ``prompts`` groups on ``cards`` cards; return the record of each step."""
    home = folder / f"{cards}-{prompts}-{steps}-{len(others)}"
    home.mkdir()
    record = home / "record.jsonl"
    overrides = [*SMALL, f"model.path={folder / 'model'}", f"run.dir={home}", f"run.steps={steps}", *others]
    overrides += [f"cluster.npus={cards}", f"data.prompts_per_step={prompts}"]
    code = "from benchmarks.growth_run import observed_run; observed_run()"
    command = [sys.executable, "-c", code, str(record), *overrides]
    done = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=max(WAIT_S, STEP_S * steps),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in record.read_text().splitlines()]


POLLED = frozenset({"get", "lengths", "change ack reward", "lost"})
"""Calls of the queue for what has been generated: as often as samples arrive, or a time has passed"""


def calls_of_a_step(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the calls of the last step: `calls` that belong to the step, and `polled` while it generates. A step that
    was disturbed has more, so the least of the last three steps counts."""
    totals = [(sum(n for name, n in one["calls"].items() if name not in POLLED), one["calls"]) for one in records[-3:]]
    calls, by_method = min(totals, key=lambda pair: pair[0])
    return {"calls": calls, "polled": sum(by_method.get(name, 0) for name in POLLED)}


def growth_of_memory(records: list[dict[str, Any]], first: int) -> dict[str, tuple[float, float]]:
    """Return the mean memory of each process over a tenth of the steps behind step ``first``, and over the last tenth.
    Processes that do not live all the time between are left out."""
    tenth = max(1, len(records) // 10)
    series = [one["memory"] for one in records[first:]]
    lasting = [name for name in series[0] if all(name in sizes for sizes in series)]
    means = {
        name: [sum(s[name] for s in part) / tenth for part in (series[:tenth], series[-tenth:])] for name in lasting
    }
    return {name: (before, after) for name, (before, after) in means.items()}


def growth_of_floor(
    idle: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], first: int
) -> dict[str, tuple[float, float]]:
    """Return the same of the processes of an idle Ray, in the time of these steps; {}: they were too short."""
    tenth = max(1, len(records) // 10)
    times = [one["time"] for one in records[first:]]
    spans = [(part[0], part[-1]) for part in (times[:tenth], times[-tenth:])]
    parts = [[one["memory"] for one in idle if begin <= one["time"] <= end] for begin, end in spans]
    if not all(parts):
        return {}
    names = [name for name in parts[0][0] if all(name in sizes for part in parts for sizes in part)]
    means = {name: [sum(sizes[name] for sizes in part) / len(part) for part in parts] for name in names}
    return {name: (before, after) for name, (before, after) in means.items()}


@contextmanager
def idle_ray(home: Path) -> Iterator[Path]:
    """Keep a Ray without any work beside the block; yields a file with a line of its memory each second."""
    home.mkdir()
    record = home / "record.jsonl"
    command = [sys.executable, "-c", "from benchmarks.growth_run import idle; idle()"]
    with record.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out)
    try:
        yield record
    finally:
        process.communicate()


def idle() -> None:
    """Start a Ray as a run does, and print the memory of its processes each second until the standard input ends."""
    from select import select

    from stalesync.process.ray_cluster import ray_cluster

    with ray_cluster(None):
        while not select([sys.stdin], [], [], 1.0)[0]:
            print(json.dumps({"memory": _anonymous_bytes(), "time": time.monotonic()}), flush=True)


def observe(record: str) -> None:
    """Make the controller of this process write a line of ``record`` after each step."""
    from ray.actor import ActorHandle

    from stalesync.loop.controller import Controller

    calls: Counter[str] = Counter()
    make_call, train_step = ActorHandle._actor_method_call, Controller.train_step

    def counted_call(self: Any, method_name: str, *args: Any, **options: Any) -> Any:
        sent = options.get("args") or (args[0] if args else ())
        calls[" ".join([method_name, *map(str, sent[:2])]) if method_name == "change" else method_name] += 1
        return make_call(self, method_name, *args, **options)

    def recorded_step(self: Controller) -> None:
        calls.clear()
        train_step(self)
        line = {
            "calls": dict(calls),
            "memory": _anonymous_bytes(),
            "folder": _folder_bytes(self.folder.path),
            "time": time.monotonic(),
            "seconds": self.step_metrics.metrics.result()["timing_s/step"],
        }
        with open(record, "a") as file:
            file.write(json.dumps(line) + "\n")

    ActorHandle._actor_method_call, Controller.train_step = counted_call, recorded_step  # type: ignore[method-assign]


def _anonymous_bytes() -> dict[str, int]:
    """Return the resident bytes that are not of files or shared, of this process and of all below it."""
    found: dict[int, int] = {}
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):
                continue
            pid = int(folder.name)
            children.setdefault(int(status["PPid"]), []).append(pid)
            found[pid] = int(status.get("RssAnon", "0 kB").split()[0]) << 10
            names[pid] = (
                victim_of(command) or (re.findall(r"ray::\w+|\w+\.py\b", command) or [status["Name"].strip()])[0]
            )
    names[os.getpid()] = "controller"
    below, reached = [os.getpid()], 0
    while reached < len(below):
        below += children.get(below[reached], [])
        reached += 1
    return {f"{names[pid]} {pid}": found[pid] for pid in below}


def _folder_bytes(folder: Path) -> int:
    apart = {"checkpoints", "hf", "logs"}
    tops = [path for path in folder.iterdir() if path.name not in apart]  # checkpoints are removed meanwhile
    files = (path for top in tops for path in [top, *top.rglob("*")] if path.is_file())
    return sum(path.stat().st_size for path in files)


def observed_run() -> None:
    """Run `scripts/train.py` in this process, whose first argument is the record and the others are overrides."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import train

    observe(sys.argv.pop(1))
    train.main()
