"""Train one step on scored groups: compute advantages, run the reference, and train minibatches.

    groups ─ claim ─► advantages ─ put ─► queue ─► train, by id ─► ack
                          ▲                 │
                          └── reward KL ── reference (kl_in=reward: before the advantages; kl_in=loss: after them)

Invariants: the samples of a step are claimed for the task `train` before any column is written for them, so the queue
rejects, by id, a sample that was trained or is being trained; the cards train exactly the claimed samples; a sample is
acknowledged after its optimizer step. This process reads no payload from the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from distqueue import PackedBatch
from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.telemetry import LiveView, Metrics
from fusion.training import split_over_ranks
from fusion.training.algorithms import Algorithm
from stalesync.cards import Cards
from stalesync.samples import ScoredSample

log = logging.getLogger(__name__)

TRAIN = "train"
"""The queue's task of training."""


class TrainQueue(Protocol):
    """The part of the queue's interface that an update uses: no method here returns payload."""

    def claim(self, task: str, ids: Sequence[str]) -> None: ...

    def put(self, batch: PackedBatch) -> object: ...

    def ack(self, task: str, ids: Sequence[str]) -> None: ...

    def drop(self, ids: Sequence[str], reason: str) -> None: ...


@dataclass(kw_only=True)
class Updater:
    """Runs the stages of an update. ``record_reports``: called with the cards' reports of every stage."""

    spec: WorkerSpec
    cards: Cards
    queue: TrainQueue
    view: LiveView
    algorithm: Algorithm
    record_reports: Callable[[Sequence[StageReport]], None]

    @property
    def kl_in(self) -> str | None:
        """Where the KL divergence from the reference is applied: `loss` or `reward`; None: there is no reference."""
        return self.spec.algorithm.kl_in if self.spec.algorithm.kl_coef > 0 else None

    def train(self, groups: dict[str, list[ScoredSample]], version: int, metrics: Metrics) -> None:
        """Trains policy ``version`` on all scored samples of these groups, in this order; drops samples whose reward
        failed.

        Raises:
            ValueError: a sample has been trained, is being trained, or has been dropped.
        """
        samples = sorted((sample for members in groups.values() for sample in members), key=lambda one: one.id)
        with metrics.timer("adv"):
            kept = self._drop_failed(samples)
            ids = [sample.id for sample in kept]
            if kept:
                self.queue.claim(TRAIN, ids)
                self._put_advantages(kept, metrics)
        if not kept:
            log.warning("no sample could be scored, nothing is trained in this step")
            return
        minibatches = [
            _split_over_replicas([sample for sample in kept if sample.prompt.id in chunk], self.spec.train.dp)
            for chunk in _split_groups(list(groups), self.spec.algorithm.minibatches)
        ]
        if self.kl_in == "loss":
            self._run_reference(self._reference_shares(minibatches, kept), metrics)
        self.view.phase("train")
        with metrics.timer("train"):
            self.record_reports(
                self.cards.on(self.spec.deployment.train).call(Worker.train, minibatches, version=version)
            )
        self.queue.ack(TRAIN, ids)

    def _drop_failed(self, samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        """Drops samples whose reward failed from the queue; returns the others."""
        for sample in samples:
            if sample.outcome.error:
                self.queue.drop([sample.id], f"reward_{sample.outcome.error}")
        return [sample for sample in samples if sample.outcome.error is None]

    def _put_advantages(self, samples: list[ScoredSample], metrics: Metrics) -> None:
        replicas = (self.spec.reference or self.spec.train).dp
        kl = self._run_reference(_split_over_replicas(samples, replicas), metrics) if self.kl_in == "reward" else {}
        if kl:
            response_tokens = sum(sample.response_tokens for sample in samples)
            metrics.add("actor/reward_kl_penalty", sum(kl.values()) / response_tokens)
        advantages, _ = self.algorithm.advantages(
            rewards=[sample.outcome.reward for sample in samples],
            groups=[sample.prompt.id for sample in samples],
            response_lengths=[sample.response_tokens for sample in samples],
            reference_kl=[kl[sample.id] for sample in samples] if kl else None,
        )
        self.queue.put(PackedBatch.from_samples([sample.id for sample in samples], {"advantage": advantages}))
        metrics.spread("critic/advantages", advantages.tolist())

    def _run_reference(self, shares: list[list[str]], metrics: Metrics) -> dict[str, float]:
        """Computes the reference's log-probabilities; returns each sample's KL by id if it is applied to the reward."""
        self.view.phase("reference")
        with metrics.timer("ref"):
            reports = self.cards.on(self.spec.deployment.reference).call(Worker.reference, shares)
        self.record_reports(reports)
        return {id: kl for report in reports for id, kl in report.reference_kl.items()}

    def _reference_shares(self, minibatches: list[list[list[str]]], samples: list[ScoredSample]) -> list[list[str]]:
        """Returns sample ids by replica of the reference; the same as for training if it uses the training layout."""
        if self.spec.reference is None:
            return [[id for shares in minibatches for id in shares[dp]] for dp in range(self.spec.train.dp)]
        return _split_over_replicas(samples, self.spec.reference.dp)


def _split_over_replicas(samples: list[ScoredSample], num_replicas: int) -> list[list[str]]:
    """Splits sample ids over data-parallel replicas, balanced by tokens."""
    shares = split_over_ranks([sample.tokens for sample in samples], num_replicas)
    return [[samples[index].id for index in share] for share in shares]


def _split_groups(groups: list[str], num_chunks: int) -> list[set[str]]:
    """Splits ``groups`` into ``num_chunks`` runs of even size, or fewer if there are fewer groups."""
    size = -(-len(groups) // num_chunks) if groups else 1
    return [set(groups[start : start + size]) for start in range(0, len(groups), size)]
