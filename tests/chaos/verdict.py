"""Judge a killed run by what was observed of its end, and a chain by what its run folder holds. Pure.

Of an end: does the message name what was killed, in time, and is anything left over? Of a chain: was every group that
was drawn trained or otherwise ended once, none older than the bound allows? At staleness 0: is it bitwise the run that
was not disturbed?
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stalesync.process.stopping import COMPLETED
from tests.chaos.plan import LOGS, STEPS, Kill

STATUS = {"SIGTERM": 143, "SIGINT": 130}
"""Exit status of a run that ends by a signal, as a shell reports it …"""
UNHANDLED = {"SIGTERM": (-15,), "SIGINT": (-2, 1)}
"""… and of one that has not begun to handle it: the interpreter is still starting"""
REPORTED = {"SIGTERM": "stopped by SIGTERM", "SIGINT": "stopped by Ctrl-C"}

FULL = r"^(error|OSError)\b.*(No space left on device|(the disk|shared memory) is full)"
NAMED = {
    "worker": r"^error: rank (?P<rank>\d+) died in stage '(?P<stage>[^']+)'",
    "queue": r"^error: the queue has failed: ",
    "raylet": r"^error: Ray's process raylet has ended",
    "gcs": r"^error: Ray's process gcs_server has ended",
    "disk": FULL,
    "shared memory": FULL,
    LOGS: r"/metrics\.jsonl': the run continues",
}
"""How the standard error names what ended a run, or what it goes on without"""
NOT_SAVED = (
    r"^error: (the controller|rank \d+) failed in stage 'save': "
    r".*(No space left on device|the disk is full).*/checkpoints/"
)
"""… and the end of a run where a checkpoint falls due while there is no space for its logs"""
# It may be killed by its guard then, exit status -9: while it connects to Ray, it can do nothing else.
NOT_STARTED = r"^error: Ray did not start on this machine"
"""… a process of Ray that is killed while Ray starts, where Ray notices that itself"""

MENDED = r"^rank (\d+) died in stage '(?:generate|idle)' .* is started again"
"""How the standard output names an engine that is replaced"""

OF_GENERATION = ("rollout/", "switch/")
"""Prefixes of metrics that count what engines do, and so differ in a step in which one was replaced"""

OF_THIS_START = ("timing_s/", "perf/", "save/", "memory/", "distqueue/")
"""Prefixes of metrics that depend on how long a run took and how often it was started, not on what it computes"""


@dataclass(frozen=True)
class Ended:
    """What was observed of a run after a kill.

    Attributes:
        launched: whether the run had its folder.
        status: exit status of the controller, negative for a signal; None: it did not end and was killed.
        out, err: its standard output and error.
        rows: number of steps whose metrics were written when it was killed.
        rank: of the worker that was killed; None: another victim, or it had no rank yet.
        seconds: from the kill to the end of the last process of the run, or to the next step of one that goes on.
        limit_s: within which this had to happen.
        left: processes, segments and files that are left over.
        mended: whether the run continues because the engine of the worker is replaced.
    """

    kill: Kill
    launched: bool
    status: int | None
    out: str = ""
    err: str = ""
    rows: int = 0
    rank: int | None = None
    seconds: float = 0.0
    limit_s: float = float("inf")
    left: tuple[str, ...] = ()
    mended: bool = False

    @property
    def late(self) -> bool:
        went_to_its_end = self.kill.ends and self.status == 0
        return self.seconds > self.limit_s and not went_to_its_end

    @property
    def message(self) -> str:
        """The line in which the run says why it ended."""
        if self.status is None:
            return "it did not end"
        if self.mended and self.status == 0:
            return "mended: the engine is replaced"
        if self.status == 0:
            return "finished"
        lines = self.err.strip().splitlines()
        named = next((line for line in lines if line.startswith("error: ")), None)
        outcome = re.search(r"stopped by [\w-]+", self.out)
        return named or (outcome and outcome[0]) or (lines[-1] if lines else f"exit status {self.status}")

    @property
    def unnamed(self) -> str:
        """Why the end is not that of this victim, or its message does not name it; "": it does."""
        kill = self.kill
        if self.status is None:
            return "it did not end"
        if self.mended and self.status == 0:
            died = re.findall(MENDED, self.out, re.MULTILINE)
            return "" if self.rank is None or str(self.rank) in died else f"rank {self.rank} is not named"
        if kill.signal == "SIGKILL" and kill.victim == "controller":
            return ""
        if self.status == 0 and kill.victim == LOGS and not re.search(NAMED[LOGS], self.err):
            return "logs are not named"
        if self.status == 0:
            return f"{kill.signal} was ignored" if kill.victim == "controller" and not self._may_finish else ""
        if kill.victim == "controller":
            return self._unnamed_signal()
        if kill.victim == LOGS and self.status == 1 and re.search(NOT_SAVED, self.err, re.MULTILINE):
            return ""
        if not kill.ends:
            return f"it ended, exit status {self.status}"
        frozen = kill.step is None and kill.victim in ("raylet", "gcs")
        if self.status not in ((1, -9) if frozen else (1,)):
            return f"exit status {self.status}, not 1"
        found = re.search(NAMED[kill.victim], self.err, re.MULTILINE)
        if found is None and kill.step is None and kill.victim in ("raylet", "gcs"):
            found = re.search(NOT_STARTED, self.err, re.MULTILINE)
        if found is None:
            return f"{kill.victim} is not named"
        if self.rank is not None and int(found["rank"]) != self.rank:
            return f"rank {found['rank']} is named instead of {self.rank}"
        return ""

    @property
    def _may_finish(self) -> bool:
        """Whether a run that received a signal may come to its end: it had trained all steps; or it says that SIGTERM,
        which lets it end its step, arrived in the last one. The metrics of a step are written in the next one."""
        in_last = self.kill.signal == "SIGTERM" and self.rows >= STEPS - 2 and COMPLETED in self.out
        return self.rows >= STEPS or in_last

    def _unnamed_signal(self) -> str:
        signal = self.kill.signal
        if not self.launched:
            if self.status == STATUS[signal]:
                return "" if REPORTED[signal] in self.err else f"the standard error does not say {REPORTED[signal]!r}"
            return "" if self.status in UNHANDLED[signal] else f"exit status {self.status}"
        if self.status != STATUS[signal]:
            return f"exit status {self.status}, not {STATUS[signal]}"
        return "" if REPORTED[signal] in self.out else f"the report does not say {REPORTED[signal]!r}"


@dataclass(frozen=True)
class Remains:
    """What the folder of a run that has gone to its end holds.

    Attributes:
        metrics, groups: rows of `metrics.jsonl` and `groups.jsonl`.
        drawn: number of prompts that were drawn from the source.
        in_progress: groups that the last checkpoint holds, which have not ended.
    """

    steps: int
    bound: int
    metrics: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    drawn: int
    in_progress: Sequence[str] = ()

    @classmethod
    def of_state(
        cls,
        state: Mapping[str, Any],
        *,
        steps: int,
        bound: int,
        metrics: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> Remains:
        """Return the remains, with what the controller's state of the last checkpoint says of prompts and groups."""
        prompts, ledger = state["prompts"], state["ledger"]
        drawn = prompts["epoch"] * (prompts["rows"] or 0) + prompts["position"] - prompts["skipped"]
        in_progress = [*ledger["in_flight"], *ledger["finished"]]
        return cls(steps, bound, metrics=metrics, groups=groups, drawn=drawn, in_progress=in_progress)


@dataclass
class Verdict:
    """Faults of a chain, a line for each."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)
    not_bitwise: list[str] = field(default_factory=list)


def judge(remains: Remains) -> Verdict:
    """Judge a chain by its run folder."""
    verdict = Verdict()
    times = Counter(row["group"] for row in remains.groups)
    verdict.twice += [f"group {group} has ended {count} times" for group, count in times.items() if count > 1]
    verdict.twice += [f"group {group} has ended and is in progress" for group in remains.in_progress if group in times]
    missing = remains.drawn - len({*times, *remains.in_progress})
    if missing > 0:
        verdict.lost.append(f"{missing} of {remains.drawn} groups have no end and are not in progress")
    if missing < 0:
        verdict.twice.append(f"{-missing} groups more than the {remains.drawn} that were drawn")
    verdict.lost += [f"group {row['group']}: {row['ended']}" for row in remains.groups if row["ended"] == "failed:lost"]
    rows = Counter(int(row["step"]) for row in remains.metrics)
    verdict.lost += [f"step {step} has no metrics" for step in range(1, remains.steps + 1) if not rows[step]]
    verdict.twice += [f"step {step} has {count} rows of metrics" for step, count in rows.items() if count > 1]
    for row in remains.groups:
        if row["ended"] == "trained" and row["lag"] > remains.bound:
            verdict.too_old.append(f"group {row['group']} was trained at an age of {row['lag']}")
    return verdict


def has_failed_rewards(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a reward process was killed while it scored: its sample is not trained, as it may have been the cause."""
    return any(row.get("reward/failed", 0) for row in metrics)


def differences(
    metrics: Sequence[Mapping[str, Any]],
    weights: Mapping[str, str],
    *,
    of_metrics: Sequence[Mapping[str, Any]],
    of_weights: Mapping[str, str],
) -> list[str]:
    """Compare a run with the undisturbed one. ``weights``: digests of the exported files by name."""
    found = []
    for ours, theirs in zip(map(computed, metrics), map(computed, of_metrics), strict=False):
        if "rollout/engine_restarts" in ours:
            ours, theirs = without_generation(ours), without_generation(theirs)
        if names := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            values = (f"{name} {ours.get(name)}, not {theirs.get(name)}" for name in names[:5])
            found.append(f"step {ours['step']}: {'; '.join(values)}")
    if len(metrics) != len(of_metrics):
        found.append(f"{len(metrics)} steps instead of {len(of_metrics)}")
    if weights != of_weights:
        names = sorted(name for name in weights.keys() | of_weights.keys() if weights.get(name) != of_weights.get(name))
        found.append(f"final weights: {', '.join(names)}")
    return found


def computed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that must be the same however often the run was started."""
    return {name: value for name, value in row.items() if not name.startswith(OF_THIS_START)}


def without_generation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that must be the same although an engine was replaced in it."""
    return {name: value for name, value in row.items() if not name.startswith(OF_GENERATION)}
