"""Change how a running run generates: a request file in its folder, read between two steps.

scripts/control.py runs/NAME engines=0 rollout.engine.kv_fraction=0.5
    │ checked against the run's config.yaml
    ▼
runs/NAME/control.json ──next switch to INFER──► applied, or refused with the reason; either way a line in
                                                 runs/NAME/control.jsonl: step, share, outcome
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.colocate import InferenceShare
from fusion.telemetry.files import JsonLines, read_jsonl, write_atomic
from stalesync.job.config import Config
from stalesync.job.other_names import check_moved, migrate
from stalesync.job.overrides import load

log = logging.getLogger(__name__)
REQUEST = "control.json"
RECORD = "control.jsonl"


@dataclass(frozen=True)
class Limits:
    """The config that a share is validated against."""

    config: Config

    @classmethod
    def of_run(cls, folder: Path) -> "Limits":
        """Return those of the run in a folder; raise ValueError if it is none."""
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder}: expected the folder of a run, with its config.yaml")
        return cls(load(folder / "config.yaml"))

    @property
    def engines(self) -> list[tuple[int, ...]]:
        return self.config.deployment.engines(self.config.infer_layout.of_one_engine.world)

    @property
    def start(self) -> InferenceShare:
        return InferenceShare.of(self.config.rollout, len(self.engines))

    @property
    def longest_request(self) -> int:
        """Maximum number of tokens of a sample or of an answer in an evaluation, with its prompt."""
        answer = self.config.data.max_prompt_length + (self.config.eval.max_response_length or 0)
        return max(self.config.longest_sample, answer)

    def changed(self, share: InferenceShare, changes: Mapping[str, Any]) -> InferenceShare:
        """Return the share with changes applied; raise ValueError as `InferenceShare.changed`."""
        check_moved(changes)
        return share.changed(changes, self.config.rollout, engines=len(self.engines), max_tokens=self.longest_request)

    def restored(self, state: Mapping[str, Any], num_engines: int) -> InferenceShare:
        """Return a share from its `state`, of a run with ``num_engines``. With another number, all of them generate."""
        engines = {} if num_engines == len(self.engines) else {"engines": "all"}
        return self.changed(self.start, migrate(state) | engines)


def submit(folder: Path, changes: Mapping[str, Any]) -> InferenceShare:
    """Write a request to a run's folder, merged with a pending one; return the share that is requested. Raise
    ValueError, and write nothing, if ``folder`` is not that of a run, or the changes do not fit its config."""
    limits = Limits.of_run(folder)
    waiting = folder / REQUEST
    requested = (json.loads(waiting.read_text()) if waiting.is_file() else {}) | dict(changes)
    share = limits.changed(present_share(folder, limits), requested)
    write_atomic(waiting, json.dumps(requested) + "\n")
    return share


def present_share(folder: Path, limits: Limits) -> InferenceShare:
    """Return the current share, from the run's record."""
    rows = read_jsonl(folder / RECORD, {"outcome": str, "share": dict, "num_engines": int})
    applied = [row for row in rows if row["outcome"] == "applied"]
    return limits.restored(applied[-1]["share"], applied[-1]["num_engines"]) if applied else limits.start


class ControlDesk:
    def __init__(self, folder: Path, config: Config):
        self._folder, self._limits = folder, Limits(config)
        self.share = self._limits.start

    def state_dict(self) -> dict[str, Any] | None:
        """Return the share for a checkpoint; None if it is that of the config."""
        if self.share == self._limits.start:
            return None
        return {"share": self.share.state(), "num_engines": len(self._limits.engines)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self.share = self._limits.restored(state["share"], state["num_engines"])

    def read(self, step: int, kv_tokens: float | None) -> str | None:
        """Take the pending request, if any; return its outcome for the log. ``kv_tokens``: capacity of the smallest KV
        cache of the last step; None before the first. A request that would leave less than the longest sample needs is
        refused, as it would fail the run."""
        waiting = self._folder / REQUEST
        if not waiting.is_file():
            return None
        taken = waiting.rename(waiting.with_suffix(".taken"))
        try:
            changes = json.loads(taken.read_text())
            share = self._limits.changed(self.share, changes)
            self._check_room(share, kv_tokens)
        except ValueError as error:
            outcome, reply = f"refused: {error}", f"request refused, generation continues unchanged: {error}"
        else:
            self.share = share
            outcome, reply = "applied", f"from step {step} generation has {share}"
        record = JsonLines(self._folder / RECORD, lambda full: log.warning("%s; the outcome is not recorded", full))
        row = {"step": step, "share": self.share.state(), "num_engines": len(self._limits.engines)}
        record.write(row | {"outcome": outcome})
        record.close()
        taken.unlink()
        return reply

    def _check_room(self, share: InferenceShare, kv_tokens: float | None) -> None:
        longest = self._limits.longest_request
        left = longest if kv_tokens is None else int(kv_tokens * share.kv_fraction / self.share.kv_fraction)
        if left < longest:
            raise ValueError(
                f"rollout.engine.kv_fraction={share.kv_fraction} would leave about {left} tokens of KV cache, less "
                f"than the longest sample or answer of an evaluation, {longest} with its prompt"
            )
