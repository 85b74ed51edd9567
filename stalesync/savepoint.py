"""What the controller writes into a checkpoint beside what the cards do: one cut, taken while nothing runs.

    checkpoints/step-N/   trainer/                   weights, optimizer, step: by the cards
                          queue/                     samples that are under way, those suspended included
                          controller.json            last: a checkpoint without it was not written to its end

Samples that were generated and not scored when the cut was taken are handed to the reward again; nothing else is done
twice.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion.rewards import RewardOutcome
from fusion.telemetry.files import sync, write_atomic
from stalesync.prompts import Prompt
from stalesync.samples import ScoredSample

if TYPE_CHECKING:
    from stalesync.controller import Controller

NAME = "controller.json"
QUEUE = "queue"
TRAINER = "trainer"


def begin(target: Path, controller: Controller) -> str:
    """Writes the queue's part, and returns the controller's for `finish`. Nothing is on an engine, and no sample is
    between the queue and the controller. What an earlier run has left there unfinished goes."""
    ledger, generation = controller.ledger, controller.generation
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if ledger.in_flight or ledger.finished:
        controller.queue.checkpoint(str((target / QUEUE).resolve()))
    prompts = {sample.prompt.id: sample.prompt for members in controller.groups.scored.values() for sample in members}
    prompts |= controller.scorer.expected | generation.prompts
    state = {
        "step": controller.step,
        "prompts": controller.source.state_dict(),
        "share": controller.desk.changed,
        "ledger": ledger.state_dict(),
        "buffer": generation.buffer.state_dict(),
        "texts": [asdict(prompt) for prompt in prompts.values()],
        "expected": sorted(controller.scorer.expected),
        "scored": [_plain(sample) for members in controller.groups.scored.values() for sample in members],
        "failed_rewards": controller.groups.failed_rewards,
    }
    return json.dumps(state)


def finish(target: Path, state: str) -> None:
    """Everything else of the checkpoint is on disk: from now on it counts."""
    write_atomic(target / NAME, state)
    for path in (target / NAME, target, target.parent):
        sync(path)


def read(checkpoint: Path, controller: Controller) -> None:
    """The queue has been created from the checkpoint's, if it has one."""
    state = json.loads((checkpoint / NAME).read_text())
    controller.step = state["step"]
    controller.groups.failed_rewards = state["failed_rewards"]
    controller.source.load_state_dict(state["prompts"])
    controller.desk.restore(state["share"])
    controller.ledger.load_state_dict(state["ledger"])
    prompts = {fields["id"]: Prompt(**fields | {"ids": tuple(fields["ids"])}) for fields in state["texts"]}
    controller.generation.buffer.load_state_dict(state["buffer"])
    controller.generation.prompts = {group: prompts[group] for group in controller.generation.buffer.groups}
    controller.scorer.expect([prompts[group] for group in state["expected"]])
    for fields in state["scored"]:
        outcome = RewardOutcome(**fields.pop("outcome"))
        sample = ScoredSample(prompt=prompts[fields.pop("group")], outcome=outcome, **fields)
        controller.groups.scored.setdefault(sample.prompt.id, []).append(sample)


def queue_of(checkpoint: Path | None) -> str | None:
    """The queue's part of a checkpoint, to create the queue from; None where the checkpoint has none."""
    folder = None if checkpoint is None else checkpoint / QUEUE
    return str(folder.resolve()) if folder is not None and folder.is_dir() else None


def newest(folder: Path) -> Path | None:
    """The checkpoint of a run with the highest step that was written to its end."""
    whole = [path.parent for path in folder.glob(f"checkpoints/step-*/{NAME}")]
    return max(whole, key=lambda path: json.loads((path / NAME).read_text())["step"], default=None)


def prune(folder: Path, keep: int) -> None:
    """Removes whole checkpoints but the last ``keep`` (0: none is removed), and what is left of ones older than those
    that were not written to their end. What is removed ceases to count first."""
    steps = {path: int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}
    whole = sorted((path for path in steps if (path / NAME).is_file()), key=lambda path: steps[path])
    if keep and len(whole) >= keep:
        for path in [path for path in steps if steps[path] < steps[whole[-keep]]]:
            (path / NAME).unlink(missing_ok=True)
            shutil.rmtree(path)


def _plain(sample: ScoredSample) -> dict[str, Any]:
    fields = asdict(sample)
    return fields | {"group": fields.pop("prompt")["id"]}
