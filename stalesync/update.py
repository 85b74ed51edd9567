"""From scored groups to one optimizer step of the policy: advantages, reference, minibatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distqueue import DistQueue, PackedBatch
from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.telemetry import LiveView, Metrics
from fusion.training import split_over_ranks
from fusion.training.algorithms import Algorithm
from stalesync.cards import Cards
from stalesync.scoring import Scored

log = logging.getLogger(__name__)


@dataclass
class Updater:
    """``take``: is given the reports of the cards."""

    spec: WorkerSpec
    cards: Cards
    queue: DistQueue
    view: LiveView
    algorithm: Algorithm
    take: Callable[[Sequence[StageReport]], None]

    @property
    def kl_in(self) -> str | None:
        """Where the divergence from the reference goes: `loss` or `reward`; None: there is no reference."""
        return self.spec.algorithm.kl_in if self.spec.algorithm.kl_coef > 0 else None

    def train(self, groups: dict[str, list[Scored]], version: int, metrics: Metrics) -> None:
        """Trains policy ``version`` on all scored samples of these groups, in this order. What could not be scored is
        dropped, by name."""
        samples = sorted((sample for members in groups.values() for sample in members), key=lambda one: one.id)
        with metrics.timer("adv"):
            kept = self._advantages(samples, metrics)
        minibatches = [
            _deal([sample for sample in kept if sample.prompt.id in chunk], self.spec.train.dp)
            for chunk in _chunks(list(groups), self.spec.algorithm.minibatches)
        ]
        if not kept:
            log.warning("no sample could be scored, nothing is trained in this step")
            return
        if self.kl_in == "loss":
            self._reference(self._shares_of_reference(minibatches, kept), metrics)
        self.view.phase("train")
        ids = [sample.id for sample in kept]
        leased = self.queue.get("train", ["advantage"], count=len(ids))
        assert set(leased.ids) == set(ids), "the queue hands out other samples than the ledger lets train"
        with metrics.timer("train"):
            self.take(self.cards.on(self.spec.deployment.train).call(Worker.train, minibatches, version=version))
        self.queue.ack("train", ids)

    def _advantages(self, samples: list[Scored], metrics: Metrics) -> list[Scored]:
        """Puts advantages to the queue; returns what is trained."""
        for sample in samples:
            if sample.outcome.error:
                self.queue.drop([sample.id], f"reward_{sample.outcome.error}")
        kept = [sample for sample in samples if sample.outcome.error is None]
        if kept:
            replicas = (self.spec.reference or self.spec.train).dp
            kl = self._reference(_deal(kept, replicas), metrics) if self.kl_in == "reward" else {}
            if kl:
                metrics.add("actor/reward_kl_penalty", sum(kl.values()) / sum(s.response_tokens for s in kept))
            values, _ = self.algorithm.advantages(
                [s.outcome.reward for s in kept],
                [s.prompt.id for s in kept],
                [s.response_tokens for s in kept],
                [kl[s.id] for s in kept] if kl else None,
            )
            self.queue.put(PackedBatch.from_samples([sample.id for sample in kept], {"advantage": values}))
            metrics.spread("critic/advantages", values.tolist())
        return kept

    def _reference(self, shares: list[list[str]], metrics: Metrics) -> dict[str, float]:
        """Reference log-probabilities of samples; each one's KL, where rewards are made of it."""
        self.view.phase("reference")
        with metrics.timer("ref"):
            reports = self.cards.on(self.spec.deployment.reference).call(Worker.reference, shares)
        self.take(reports)
        return {id: kl for report in reports for id, kl in report.reference_kl.items()}

    def _shares_of_reference(self, minibatches: list[list[list[str]]], kept: list[Scored]) -> list[list[str]]:
        """Ids by replica of the reference: as they are trained where it computes in the training layout."""
        if self.spec.reference is None:
            return [[id for shares in minibatches for id in shares[dp]] for dp in range(self.spec.train.dp)]
        return _deal(kept, self.spec.reference.dp)


def _deal(samples: list[Scored], replicas: int) -> list[list[str]]:
    """Sample ids for each data-parallel replica, balanced by tokens."""
    shares = split_over_ranks([sample.tokens for sample in samples], replicas)
    return [[samples[index].id for index in share] for share in shares]


def _chunks(groups: list[str], count: int) -> list[set[str]]:
    """``groups`` in ``count`` runs as even as they go; fewer where there are fewer groups."""
    size = -(-len(groups) // count) if groups else 1
    return [set(groups[start : start + size]) for start in range(0, len(groups), size)]
