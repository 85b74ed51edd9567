"""Count, in a real run of a tiny model, the controller's calls of Ray, memory of its processes and bytes of its folder.

The run is one as `scripts/train.py` starts it, and writes a line per step. `calls`: calls of actors by method that the
controller made in the step; `rss`: resident bytes of the controller, and of all workers; `folder`: bytes of the run's
folder without checkpoints, model and logs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
WAIT_S = 900


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
        command, cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S, env=os.environ | {"OMP_NUM_THREADS": "1"}
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


def growth_of_rss(records: list[dict[str, Any]], name: str, first: int) -> float:
    """Return by how much memory grew behind step ``first``: the mean of the last tenth of the steps over the mean of a
    tenth from there on, less 1."""
    sizes = [one["rss"][name] for one in records]
    tenth = max(1, len(sizes) // 10)
    return (sum(sizes[-tenth:]) / sum(sizes[first : first + tenth])) - 1


def observe(record: str) -> None:
    """Make the controller of this process write a line of ``record`` after each step."""
    from ray.actor import ActorHandle

    from fusion.colocate import Worker
    from stalesync.controller import Controller

    calls: Counter[str] = Counter()
    make_call, train_step = ActorHandle._actor_method_call, Controller.train_step
    pids: list[int] = []

    def counted_call(self: Any, method_name: str, *args: Any, **options: Any) -> Any:
        sent = options.get("args") or (args[0] if args else ())
        calls[" ".join([method_name, *map(str, sent[:2])]) if method_name == "change" else method_name] += 1
        return make_call(self, method_name, *args, **options)

    def recorded_step(
        self: Controller, step: int, close_last: Callable[[], None], log_last: Callable[[], None]
    ) -> None:
        if not pids:
            pids.extend(status["pid"] for status in self.cards.on().ask(Worker.status))
        calls.clear()
        train_step(self, step, close_last, log_last)
        line = {
            "calls": dict(calls),
            "rss": {"controller": _resident_bytes("self"), "workers": sum(map(_resident_bytes, pids))},
            "folder": _folder_bytes(self.folder.path),
            "seconds": self.step_metrics.metrics.result()["timing_s/step"],
        }
        with open(record, "a") as file:
            file.write(json.dumps(line) + "\n")

    ActorHandle._actor_method_call, Controller.train_step = counted_call, recorded_step  # type: ignore[method-assign]


def _resident_bytes(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _folder_bytes(folder: Path) -> int:
    apart = {"checkpoints", "hf", "logs"}
    files = (path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in apart)
    return sum(path.stat().st_size for path in files)


def observed_run() -> None:
    """Run `scripts/train.py` in this process, whose first argument is the record and the others are overrides."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import train

    observe(sys.argv.pop(1))
    train.main()
