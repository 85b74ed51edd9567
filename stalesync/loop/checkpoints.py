"""Save a run between two steps, and restore it.

    controller   … ─ settle, cut ─► next step ─► next step ─► … ─ cut: waits until the previous one is written ─► …
    cards             └ snapshot: a copy of the state in host memory; the queue writes its own
                             └─► save: the copy, synced ──┐
    thread                                                └─► manifest.json ─► older checkpoints are removed

Invariants:
1. One checkpoint is written at a time, and a cut begins when the previous one is complete.
2. A checkpoint is complete (its manifest exists) only when all its other files are on disk; only then are older ones
   removed.
3. An error is raised when the run next checks its cards, begins another save, or ends.
4. Memory that was freed since the last save is returned to the system: glibc keeps it in pieces, which grow."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distqueue.checkpoint import release_freed
from distqueue.errors import StorageFull
from fusion.colocate import Worker
from fusion.rollout.partial_samples import check_kept
from fusion.telemetry.manifest import read_manifest, write_seals
from fusion.telemetry.run_contents import complete_checkpoints
from stalesync.evaluation import Evaluation
from stalesync.job import savepoint
from stalesync.job.resume import Reopened
from stalesync.job.resume_rules import ENDED, RULES, Rule
from stalesync.loop.controller import Controller
from stalesync.process import in_flight
from stalesync.process.failures import RunFailed
from stalesync.process.run_log import add_note


class SaveFailed(RunFailed):
    """The controller's part of a checkpoint could not be written."""


ADVICE = (
    "the run ends because a checkpoint could not be written; those that are complete stay. Where there is no space, "
    "free some, or move the run's folder to another disk and set run.dir; then resume with run.resume=true"
)


class Saver:
    def __init__(self) -> None:
        self._writing: Future[float] | None = None
        """Gives the seconds of writing the checkpoint that was begun last; None: that was taken note of"""
        self._figures: dict[str, float] = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure the block, in which the run is paused for a cut. Wait first until the previous checkpoint is written;
        raise RunFailed if it could not be."""
        start = time.perf_counter()
        self.finish()
        cut = time.perf_counter()
        try:
            yield
        except (OSError, StorageFull) as error:
            failed = SaveFailed(_describe(error))
            add_note(failed, ADVICE)
            raise failed from error
        self._figures |= {"timing_s/save": time.perf_counter() - start, "timing_s/save/wait": cut - start}

    def begin(self, write: Callable[[], None], discard: Callable[[], None] = lambda: None) -> None:
        """Run ``write`` in the thread, and ``discard`` if that fails; return at once."""
        assert self._writing is None, "one checkpoint is written at a time"
        self._writing = in_flight.begin(_seconds_of, write, discard)

    @property
    def writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def check(self) -> None:
        """Raise RunFailed if a checkpoint could not be written."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def finish(self) -> None:
        """Wait for the thread; raise RunFailed if its checkpoint could not be written."""
        if self._writing is not None:
            self._figures["save/write_s"] = self._writing.result()
            self._writing = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a cut since the last call: seconds of the pause, seconds of it spent waiting for the
        previous checkpoint, and seconds of writing that one."""
        figures, self._figures = self._figures, {}
        return figures


def _seconds_of(write: Callable[[], None], discard: Callable[[], None]) -> float:
    start = time.perf_counter()
    try:
        write()
    except Exception as error:
        discard()
        if isinstance(error, RunFailed):
            add_note(error, ADVICE)
            raise
        add_note(failed := SaveFailed(_describe(error)), ADVICE)
        raise failed from error
    finally:
        release_freed()
    return time.perf_counter() - start


def _describe(error: Exception) -> str:
    return f"the controller failed in stage 'save': {type(error).__name__}: {error}"


log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Checkpoints:
    """Save and restore the run of ``loop``. ``inputs``: what the run depends on (`inputs_of`)."""

    loop: Controller
    evaluation: Evaluation
    inputs: Mapping[str, Any]
    saver: Saver = field(default_factory=Saver)
    _draft_starts: dict[int, int] = field(default_factory=dict)
    """Number of processes that each card that drafts had had at the last cut"""

    def cut(self) -> dict[str, Any]:
        """Pause the run for a consistent snapshot of weights, queue and controller, for `save`: the cards' state is
        copied, the queue's is written, and the controller's is returned."""
        loop = self.loop
        loop.view.phase("save")
        with self.saver.pause():
            loop.settle()
            snapshot = loop.cards.on(loop.spec.deployment.train).begin(Worker.snapshot)
            target = savepoint.path_of(loop.folder, loop.last.number)
            savepoint.begin(target, loop.queue if loop.admission.ledger.num_untrained else None)
            state = {"inputs": self.inputs, **loop.state_dict()}
            loop.step_metrics.take(loop.cards.wait(snapshot))
            if loop.config.rollout.drafts.from_history:
                self._snapshot_drafts()
        return state

    def _snapshot_drafts(self) -> None:
        """Let the engines that live copy their drafts, each in a stage of its own, so that it may die in it."""
        loop, drafting = self.loop, {*self.loop.spec.drafting_ranks}
        living = [ranks for engine, ranks in enumerate(loop.spec.engines) if engine not in loop.engines.absent]
        by_engine = [[rank for rank in ranks if rank in drafting] for ranks in living]
        self._draft_starts = {rank: loop.cards.num_starts(rank) for ranks in by_engine for rank in ranks}
        with loop.engines.replacing():
            loop.cards.wait_all([loop.cards.on(ranks).begin(Worker.snapshot_drafts) for ranks in by_engine])

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint from which a run of the same name can resume, and the Hugging Face export, while the next
        steps run. The cards hash what they write; the manifest of all files is written last."""
        loop, folder = self.loop, self.loop.folder
        target, export, as_json = savepoint.path_of(folder, state["step"]), str(folder.hf), json.dumps(state)
        log_bytes = folder.log_bytes()
        starts, best, chosen = self._draft_starts, self.evaluation.best(), self.evaluation.history.best

        def write() -> None:
            loop.cards.on(loop.spec.deployment.train).call(Worker.save, str(target / savepoint.TRAINER), export)
            if loop.config.rollout.drafts.from_history:
                if ranks := self._unchanged(starts):
                    loop.cards.on(ranks).call(Worker.save_drafts, str(target / savepoint.DRAFTS))
            savepoint.finish(target, as_json, folder.seal(log_bytes))
            if best is not None:
                folder.write_best(best)
            savepoint.prune(target.parent, loop.config.run.keep, spared=chosen[:1] if chosen else ())

        self.saver.begin(write, discard=partial(savepoint.discard, target))

    def _unchanged(self, starts: Mapping[int, int]) -> list[int]:
        """Return the ranks with the processes of the cut, by their numbers then: one replaced since has no copy."""
        cards, absent = self.loop.cards, self.loop.engines.absent_ranks
        same = [rank for rank, number in starts.items() if cards.num_starts(rank) == number and rank not in absent]
        if others := sorted(starts.keys() - {*same}):
            log.warning("ranks %s were replaced: their drafts are not part of the checkpoint", others)
        return same

    def restore(self, earlier: Reopened) -> None:
        """Resume from a checkpoint. The queue was created from the checkpoint's or, if groups in progress end, anew."""
        loop, config, checkpoint, state = self.loop, self.loop.config, earlier.checkpoint, earlier.state
        assert checkpoint is not None
        check_kept(loop.queue.holding, config.rollout.truncates)
        if earlier.ended:
            state = savepoint.without_groups(state, ENDED)
        loop.load_state_dict(state, other_order=any(RULES[key] is Rule.ORDER for key in earlier.accepted))
        step, folder = loop.last.number, loop.folder
        folder.rewind(step, read_manifest(checkpoint).seals, partial(write_seals, checkpoint))
        if earlier.ended:
            folder.log_groups(step + 1, earlier.ended, f"failed:{ENDED}")
        digests = {} if "eval.files" in earlier.accepted else self.evaluation.digests
        self.evaluation.history.restore(folder.evaluations(), digests, complete_checkpoints(folder.path))
        folder.write_best(self.evaluation.best())
        steps_left = (config.run.steps - step) * config.algorithm.minibatches
        trainers = loop.cards.on(loop.spec.deployment.train)
        trainers.call(Worker.restore, str(checkpoint / savepoint.TRAINER), steps_left)
        if line := savepoint.schedule_of(checkpoint, config, steps_left).describe():
            loop.view.note(line)
        if config.rollout.drafts.from_history:
            generators = loop.cards.on([rank for ranks in loop.spec.engines for rank in ranks])
            generators.call(Worker.restore_drafts, str(checkpoint / savepoint.DRAFTS))
        loop.view.note(f"resuming from {checkpoint}, step {step}")
        if (saved_in := savepoint.layout_of(checkpoint)) != loop.spec.train:
            loop.view.note(f"it was saved by {saved_in.world} cards in {saved_in}: masters and moments are resharded")
