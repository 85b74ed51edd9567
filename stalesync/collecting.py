"""From prompts to the groups of a step: weights to the engines, requests admitted, generated, suspended, scored.

    publish ─► admit ─► generate ─► suspend, switch back ─► score what could not be scored meanwhile
      ▲          ▲          │
      │          └── feed ──┤   while samples come, and while cards train: engines that run low, chunks that have ended
      └──── refill ─────────┘   groups that were filtered are made up for

What may start is the ledger's to say (`staleness.py`), which engine has which request is `generation.py`'s, what
becomes of a group `groups.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.colocate import InferenceShare, Worker, WorkerSpec
from fusion.rollout import EvalAnswer
from fusion.telemetry import LiveView
from stalesync.cards import Cards
from stalesync.config import Config
from stalesync.generation import Generation
from stalesync.groups import Groups
from stalesync.prompts import Prompt, PromptSource
from stalesync.record import StepRecord
from stalesync.scoring import Scorer
from stalesync.staleness import StalenessLedger

MOST_REFILLS = 10
"""Batches of groups that a step may filter before it trains what it has"""

TAIL = 0.1
"""Generation's tail (`timing_s/gen_tail`): the seconds in which at most this part of a step's samples is generated"""

LOOK_S = 0.5
"""While it waits for samples the controller looks this often whether a card has failed."""


@dataclass
class Collector:
    """Every part is handed in. The cards that train are in the training phase before and after each method."""

    config: Config
    spec: WorkerSpec
    cards: Cards
    source: PromptSource
    scorer: Scorer
    view: LiveView
    ledger: StalenessLedger
    generation: Generation
    groups: Groups
    record: StepRecord
    _share: InferenceShare | None = None
    """What the engines were set up with"""
    _steps: int = 0
    """That the run has left, the present one included"""

    def collect(self, steps: int, share: InferenceShare) -> None:
        """Until the groups of a step are there, and scored, as far as there can be enough. ``steps``: that the run has
        left, this one included."""
        self._steps = steps
        self._collect(share)
        while self._refill():  # groups were filtered after the engines had stopped
            self._collect(share)

    def attend(self) -> None:
        """While some cards train, others generate."""
        self.groups.note(*self.scorer.poll(0.0))
        self._feed()

    def settle(self) -> None:
        """Nothing is on an engine, and what was on its way through the queue has arrived and is scored."""
        self._suspend()
        while self.generation.buffer.num("running"):  # finished, and on their way through the queue
            self.groups.note(*self.scorer.poll(LOOK_S))
        self._judge()
        while self.scorer.num_unscored:
            self.groups.note(*self.scorer.poll(LOOK_S))

    def answer(self, prompts: Sequence[Prompt], share: InferenceShare) -> dict[str, EvalAnswer]:
        """One answer a prompt with the present weights, by the prompt's id. No task of the queue gets them."""
        self.generation.suspend()
        self._switch("infer", share)
        answers = self.generation.answer(prompts, share.engines)
        self._switch("train", share)
        return answers

    def _collect(self, share: InferenceShare) -> None:
        """The weights of the present version go to the engines, which go on until a step's groups are there; then the
        cards that train have them back, and everything that is finished is scored."""
        metrics = self.record.metrics
        with metrics.timer("switch"):
            self._publish(share)
        self._admit(share.engines)
        self.generation.resume(share.engines)
        with metrics.timer("gen"):
            self._generate()
            self._stop_sharing()
        with metrics.timer("switch"):
            self._switch("train", share)
        self.view.phase("reward")
        with metrics.timer("reward"):
            self._judge()

    def _publish(self, share: InferenceShare) -> None:
        """The engines get the weights of the present version. Those on cards that only generate go on meanwhile."""
        cards, take = self.spec.deployment.actor, self.record.take
        unchanged, self._share = share == self._share, share
        if unchanged and (beside := self.generation.go_on_beside(share.engines)):
            self.view.phase("send weights")
            arrives = self.cards.on(beside).begin(Worker.receive, self.ledger.version, share)
            others = [rank for rank in cards if rank not in beside]
            take(self.cards.on(others).call(Worker.switch, "infer", self.ledger.version, share, while_generating=True))
            reports = self.cards.wait(arrives)
            take(reports)
            self.generation.told(min(report.until_ns for report in reports))
        else:
            self._suspend()
            self._switch("infer", share)

    def _admit(self, engines: Sequence[int] | None = None) -> None:
        """Takes up as many groups as the ledger allows, the run has steps left for, and these engines (None: those that
        run) can begin with."""
        wanted = self._steps * self.ledger.expected_groups - self.ledger.num_untrained
        most, begun = self.ledger.may_admit, self.generation.groups_wanted(engines)
        wanted = min(wanted, most, most if begun is None else begun)
        prompts = self.source.next(wanted) if wanted > 0 else []
        self.ledger.admit([prompt.id for prompt in prompts])
        self.scorer.expect(prompts)
        self.generation.admit(prompts)

    def _refill(self) -> bool:
        """Whether a step that lacks groups because some were filtered is to go on for others in their place."""
        batch = self.config.data.prompts_per_step
        wanted = 0 < self.groups.filtered <= MOST_REFILLS * batch and not self.ledger.is_enough
        return wanted and bool(self.ledger.in_flight or self.ledger.may_admit)

    def _generate(self) -> None:
        """Until a step's groups are finished, and the oldest that must be trained in this version are among them."""
        samples_of_group = self.groups.size
        heard_s, few = time.perf_counter(), TAIL * self.ledger.expected_groups * samples_of_group
        while not self.ledger.is_enough and (self.ledger.in_flight or self._more_tokens()):
            sizes = self.ledger.num_ready, self.ledger.expected_groups
            self.view.phase("generate", *(groups * samples_of_group for groups in sizes))
            began_s, waits = time.perf_counter(), self.ledger.waits_for_older
            tail = self.generation.buffer.num("running") <= few
            arrived, scored = self.scorer.poll(LOOK_S)
            self.groups.note(arrived, scored)
            chunks = self._feed()
            self.cards.check()
            heard_s = time.perf_counter() if arrived or scored or chunks else heard_s
            self.generation.check_alive(time.perf_counter() - heard_s)
            if self._refill() and self.ledger.may_admit:
                self._admit()
                self.generation.hand_over()
            for name, holds in (("wait_older", waits), ("gen_tail", tail)):
                self.record.metrics.add(f"timing_s/{name}", (time.perf_counter() - began_s) * holds)

    def _feed(self) -> int:
        """What ended with its chunk goes on where there is room, and engines that run low get more. Returns how many
        chunks have ended."""
        chunks = self.generation.gather()
        self.record.metrics.add("rollout/chunks_total", chunks)
        if self.generation.hungry:
            self._admit()
        if chunks or self.generation.hungry:
            self.generation.hand_over()
        return chunks

    def _more_tokens(self) -> bool:
        """Whether groups that were shorter than others before them have left a step short of tokens, and further ones
        have been admitted."""
        if self.config.stalesync.train_tokens is not None:
            self._admit()
            self.generation.hand_over()
        return bool(self.ledger.in_flight)

    def _stop_sharing(self) -> None:
        """Engines whose cards train now are suspended; those that go on get what these leave."""
        shared = self.generation.of_cards(self.spec.deployment.shared)
        self._suspend(shared)
        if shared:
            self.generation.hand_over()

    def _suspend(self, engines: Sequence[int] | None = None) -> None:
        unfinished = self.generation.suspend(engines)
        self.record.metrics.add("rollout/suspended_total", unfinished)

    def _switch(self, phase: str, share: InferenceShare) -> None:
        self.view.phase(f"switch to {phase}")
        ranks = self.spec.deployment.actor if phase == "infer" else self.spec.deployment.train
        self.record.take(self.cards.on(ranks).call(Worker.switch, phase, self.ledger.version, share))

    def _judge(self) -> None:
        """Scores what could not be scored while the cards generated."""
        scored, reports = self.scorer.score_waiting()
        self.record.take(reports)
        self.groups.note([], scored)
