"""Train one step on scored groups: compute advantages, run the reference, and train minibatches.

    groups ─► advantages ─ put, claim ─► queue ─► train, by id ─► ack
                  ▲                        │
                  └───── reward KL ─── reference (kl_in=reward: before the advantages; kl_in=loss: meanwhile;
                                       on cards of its own: as groups become complete, `reference_stream`)

Invariants: the samples of a step are claimed for the task `train` as their advantages are written, so the queue
rejects, by id, a sample that was trained or is being trained; the cards train exactly the claimed samples; a sample is
acknowledged after its optimizer step. This process reads no payload from the queue.

A conversation in several branches is one sample with several rows: it has one advantage, and all its rows are claimed
and trained, or none.

The cards wait for no answer that they need not know: while the queue answers the put, the reference runs, and
training is begun behind the reference where each card trains with what it has written itself."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from distqueue import DistQueue, PackedBatch, SamplesLost
from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.rollout.packing import SHARE
from fusion.telemetry import LiveView, Metrics
from fusion.training.algorithms import Algorithm
from fusion.training.division import split_groups
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import RunningStage, calls_of_replicas, stage_call
from stalesync.loop.reference_stream import ReferenceStream
from stalesync.loop.sample_columns import SampleColumns
from stalesync.scoring.samples import LOST

log = logging.getLogger(__name__)
TRAIN = "train"
"""The queue's task of training."""
TASKS = ("reward", TRAIN)
"""Tasks that must acknowledge a sample before the queue frees it."""
BRANCH = "branch"
"""Why the rows of a conversation are dropped after training, all but the last: they were never given to be rewarded"""


@dataclass(frozen=True)
class Training:
    """A training under way. ``samples``: those that are trained; ``stage``: of the cards, None: there is nothing to
    train; ``has_lost``: whether the queue had lost others; ``begun_s``: by `time.monotonic`."""

    samples: SampleColumns
    stage: RunningStage[StageReport] | None
    has_lost: bool
    begun_s: float = 0.0


@dataclass(kw_only=True)
class Updater:
    """Run the stages of an update. ``record_reports``: called with the cards' reports of every stage."""

    spec: WorkerSpec
    cards: Cards
    queue: DistQueue
    view: LiveView
    algorithm: Algorithm
    record_reports: Callable[[Sequence[StageReport]], None]
    reference: ReferenceStream | None = None
    """What cards of its own have computed, or compute; None: there is no reference"""
    _trained: list[str] = field(default_factory=list)
    """Trained samples that are not acknowledged yet"""
    _num_accumulated: int = 0
    """Number of groups of the step's first minibatch whose gradients were to be accumulated"""
    _has_gradients: bool = False
    """Whether any of them had a sample that could be trained: no optimizer step has used its gradients yet"""

    @property
    def kl_in(self) -> str | None:
        """Where the KL divergence from the reference is applied: `loss` or `reward`; None: there is no reference."""
        return self.spec.algorithm.kl_in if self.spec.algorithm.kl_coef > 0 else None

    def begin(
        self, groups: Sequence[str], samples: SampleColumns, version: int, metrics: Metrics, *, update: bool = True
    ) -> Training:
        """Begin to train policy ``version`` on all scored samples of these groups; `finish` must follow. Drops samples
        whose reward failed, and leave out those that the queue has lost. ``groups``: in the order in which minibatches
        take them; ``samples``: of these groups, in order of ids; ``update``: False: their gradients are accumulated for
        the next call's step. Raise ValueError if a sample has been trained, is being trained, or has been dropped."""
        with metrics.timer("adv"):
            scored = self._drop_failed(samples)
        missing = scored
        running: RunningStage[StageReport] | None = None
        if self.reference is not None:
            self.reference.begin()
            missing = self.reference.missing(scored)
        if self.kl_in is not None and self.spec.reference is None and missing:
            running = self._begin_reference(self._batches(groups, missing, update and self.kl_in == "loss"))
        kl = self._take_reference(running, groups, metrics) if self.kl_in == "reward" else None
        kept = self._put_advantages(scored, metrics, kl)
        # Each card may train with what it has written itself, where it trains the same samples.
        trains_behind = running is not None and len(missing) == len(scored) == len(kept)
        if self.kl_in == "loss" and not trains_behind:
            self._take_reference(running, groups, metrics)
        has_lost = len(kept) < len(scored)
        minibatches, trains = self._batches(groups, kept, update), kept or (update and self._has_gradients)
        self._num_accumulated = 0 if update else self._num_accumulated + len(groups)
        self._has_gradients = not update and bool(kept or self._has_gradients)
        if not trains:
            log.warning("no sample of %d groups could be scored, nothing is trained on them", len(groups))
            return Training(kept, None, has_lost)
        calls = [
            stage_call(Worker.train, [shares[replica] for shares in minibatches], version=version, update=update)
            for replica in range(self.spec.train.replicas)
        ]
        training = self.cards.begin_each(calls_of_replicas(self.spec.train, self.spec.deployment.train, calls))
        if self.kl_in == "loss" and trains_behind:
            self._take_reference(running, groups, metrics)
        self.view.phase("train")
        return Training(kept, training, has_lost, time.monotonic())

    def finish(self, training: Training, metrics: Metrics) -> bool:
        """Wait for a training that has begun; return whether the queue had lost samples. Its samples are acknowledged
        when its step is closed."""
        if training.stage is None:
            return training.has_lost
        reports = self.cards.wait(training.stage)
        self.record_reports(reports)
        metrics.add("timing_s/train", time.monotonic() - training.begun_s)
        ended = training.samples
        self._trained += [sample.rows[-1] for sample in ended.samples]
        if len(ended.rows) > len(ended):  # what no reward was asked for, no acknowledgement ends
            self.queue.drop([row for sample in ended.samples for row in sample.rows[:-1]], BRANCH)
        return training.has_lost or any(report.has_lost for report in reports)

    def take_trained(self) -> list[str]:
        """Return the trained samples that the caller acknowledges to the queue now."""
        trained, self._trained = self._trained, []
        return trained

    def acknowledge(self) -> None:
        """Acknowledge the samples of the last training to the queue, which frees them."""
        if trained := self.take_trained():
            self.queue.ack(TRAIN, trained)

    def _drop_failed(self, samples: SampleColumns) -> SampleColumns:
        """Drop samples whose reward failed from the queue; return the others."""
        scored = samples.without_errors
        ids_by_error: dict[str, list[str]] = {}
        for sample, error in zip(samples.samples, samples.errors, strict=True) if len(scored) < len(samples) else ():
            if error is not None:
                ids_by_error.setdefault(error, []).extend(sample.rows)
        for error, ids in ids_by_error.items():
            self.queue.drop(ids, f"reward_{error}")
        return scored

    def _put_advantages(
        self, samples: SampleColumns, metrics: Metrics, kl: Mapping[str, float] | None = None
    ) -> SampleColumns:
        """Claim samples, and put their column of advantages; return those that the queue has not lost. ``kl``: to be
        subtracted from the rewards, by row; those that were lost when the reference read them have none."""
        with metrics.timer("adv"):
            if kl is not None and (samples := self._drop_parts(samples, kl.keys())):
                metrics.add("actor/reward_kl_penalty", sum(kl.values()) / sum(samples.sampled_tokens))
                kl = {sample.id: sum(kl[row] for row in sample.rows) for sample in samples.samples}
            while samples:
                advantages_B, _ = self.algorithm.advantages(
                    rewards=samples.rewards,
                    groups=samples.groups,
                    response_lengths=samples.sampled_tokens,
                    reference_kl=None if kl is None else [kl[id] for id in samples.ids],
                    cut=samples.cut,
                )
                num_rows_B = torch.tensor(samples.num_rows)
                columns = {"advantage": advantages_B.repeat_interleave(num_rows_B)}
                if self.spec.turns:
                    columns[SHARE] = (1 / num_rows_B).repeat_interleave(num_rows_B)
                try:
                    self.queue.put(PackedBatch.from_samples(samples.rows, columns), claim=TRAIN)
                except SamplesLost as error:
                    log.error("%d samples are not trained: %s", len(error.ids), str(error))
                    samples = self._drop_parts(samples, {*samples.rows} - {*error.ids})
                    continue
                metrics.spread("critic/advantages", advantages_B.tolist())
                zero_share = (advantages_B == 0).sum() / len(advantages_B)
                metrics.add("critic/advantages/zero_share", zero_share, len(advantages_B))
                break
        return samples

    def _drop_parts(self, samples: SampleColumns, rows: Set[str]) -> SampleColumns:
        """Return the samples of which all rows are left, and drop what is left of the others: of a conversation all
        branches are trained, or none."""
        whole = samples.where([rows >= {*sample.rows} for sample in samples.samples])
        if len(whole) < len(samples) and (parts := sorted({*samples.rows} & {*rows} - {*whole.rows})):
            self.queue.drop(parts, LOST)
        return whole

    def _begin_reference(self, batches: list[list[list[str]]]) -> RunningStage[StageReport]:
        """Begin to compute the reference's log-probabilities on the cards that train. ``batches``: as of `_batches`."""
        self.view.phase("reference")
        calls = [
            stage_call(Worker.reference, [id for shares in batches for id in shares[replica]])
            for replica in range(self.spec.train.replicas)
        ]
        return self.cards.begin_each(calls_of_replicas(self.spec.train, self.spec.deployment.reference, calls))

    def _take_reference(
        self, running: RunningStage[StageReport] | None, groups: Sequence[str], metrics: Metrics
    ) -> dict[str, float]:
        """Wait for these groups' reference, ``running`` or on cards of its own; return the KL of each row, if known."""
        assert self.reference is not None
        begun_s = time.monotonic() if running is None else running.begun_s
        reports = [] if running is None else self.cards.wait(running)
        self.record_reports(reports)
        kl = self.reference.take(groups) | {id: kl for report in reports for id, kl in report.reference_kl.items()}
        metrics.add("timing_s/ref", time.monotonic() - begun_s)
        return kl

    def _batches(self, groups: Sequence[str], samples: SampleColumns, in_minibatches: bool) -> list[list[list[str]]]:
        """Return ids of rows by batch and replica: one batch, or the minibatches that have gradients: a step without
        any would still move weights. What is accumulated begins the first minibatch, or is all of it."""
        share, number = self.spec.training.shares_prefixes, self.spec.algorithm.minibatches
        chunks = split_groups(groups, number, self._num_accumulated) if in_minibatches else []
        if len(chunks) <= 1 or not samples:
            return [samples.split(self.spec.train.replicas, share)]
        batches = [samples.where([group in chunk for group in samples.groups]) for chunk in map(set, chunks)]
        trained = [batch for number, batch in enumerate(batches) if batch or (number == 0 and self._has_gradients)]
        return [batch.split(self.spec.train.replicas, share) for batch in trained]
