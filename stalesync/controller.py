"""The loop. It handles metadata only: ids, lengths, rewards; tensors pass from card to card through the queue.

    prompts ─admit─► [switch] ─► generate ─► [switch] ─► reward ─► advantages ─► reference ─► train ─► publish ─► …
                                 │  ▲ suspended           ▲                        │           │
                                 │  └──────┐              │                        │           │
                                 └──────── queue ─────────┘──────── queue ────────►└── queue ──┘

One loop for every staleness and every deployment: what may start and what may be trained is the ledger's to say
(`staleness.py`), which cards a stage concerns is the deployment's, which engine has which request is `generation.py`'s.
At staleness 0 the ledger says: this version's batch, all of it; then nothing is ever suspended. At s > 0 a step begins
when enough groups are finished; engines on cards that train are suspended for it, the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distqueue import DistQueue
from fusion.colocate import StageReport, WorkerSpec
from fusion.rewards import reward_metrics
from fusion.telemetry import Answer, LiveView, MemoryLedger, Metrics, RunFolder, Usage, compare, throughput, wall_ns
from fusion.training.algorithms import make_algorithm
from stalesync import savepoint
from stalesync.cards import Cards
from stalesync.config import Config
from stalesync.control import ControlDesk
from stalesync.generation import Generation
from stalesync.pacing import PaceTally
from stalesync.prompts import Prompt, PromptSource
from stalesync.saving import Saver
from stalesync.scoring import Finished, Scored, Scorer
from stalesync.staleness import StalenessLedger
from stalesync.update import Updater

log = logging.getLogger(__name__)

TASKS = ("reward", "train")
"""Who must acknowledge a sample before the queue frees it."""

MOST_REFILLS = 10
"""Batches of groups that a step may filter before it trains what it has"""

TAIL = 0.1
"""Generation's tail (`timing_s/gen_tail`): the seconds in which at most this part of a step's samples is generated"""

LOOK_S = 0.5
"""While it waits for samples the controller looks this often whether a card has failed."""


@dataclass
class Controller:
    """Drives the cards through ``config.run.steps`` steps. Every part is handed in."""

    config: Config
    spec: WorkerSpec
    cards: Cards
    queue: DistQueue
    source: PromptSource
    scorer: Scorer
    folder: RunFolder
    view: LiveView
    step: int = 0
    failed_rewards: int = 0
    held_out: dict[str, float] = field(default_factory=dict)
    """Mean reward on the held-out prompts, before and after."""
    memory: MemoryLedger = field(default_factory=MemoryLedger)
    scored: dict[str, list[Scored]] = field(default_factory=dict)
    """Of groups that are admitted and not trained: what is scored of them"""

    def __post_init__(self) -> None:
        config, spec = self.config, self.spec
        stale = config.stalesync
        self.ledger = StalenessLedger(stale.max_staleness, config.data.prompts_per_step, stale.train_tokens)
        self.desk = ControlDesk(self.folder.path, config)
        self.group_size = config.algorithm.group_size
        self.generation = Generation(spec, self.cards, self.group_size, self._take)
        self.algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
        self.updater = Updater(spec, self.cards, self.queue, self.view, self.algorithm, self._take)
        self.saver = Saver()
        self.cards.heed.append(self.saver.check)
        self.metrics = Metrics()
        self.pace = PaceTally(spec.pace)
        self.usage = Usage([f"card {rank}" for rank in range(spec.world)], wall_ns())
        self._kv_tokens: float | None = None
        self._ended_now: list[Scored] = []
        """Samples of groups that failed or were filtered in this step"""
        self._filtered_now = 0
        self._row = 1
        """The step in whose record a group ends: the present one's, or in a cut the one's before, which it holds"""

    def run(self) -> list[Answer]:
        """All steps that are left; returns answers to held-out prompts before and after. The cards are in the training
        phase at both ends."""
        last, every = self.config.run.steps, self.config.run.save_every or self.config.run.steps
        held_out = self.source.evaluation(self.config.run.eval_prompts) if self.config.run.eval_prompts else []
        extra, before = self.evaluate(held_out, "before")
        after: list[dict[str, Any]] = []
        self.view.begin()
        self.usage.count(wall_ns())  # what came before belongs to no step
        while self.step < last:
            metrics = self.train_step() | extra
            self.step += 1
            extra = {}
            if self.step == last:
                extra, after = self.evaluate(held_out, "after")
            cut = self.cut() if self.step == last or self.step % every == 0 else None
            self.folder.log(self.step, metrics | extra | self.saver.metrics())
            self.view.update(self.step, metrics)
            if cut is not None:
                self.save(cut)
        self.saver.finish()
        return compare(before, after)

    def train_step(self) -> dict[str, float]:
        metrics, start = self.metrics, time.perf_counter()
        self._row = self.step + 1
        if told := self.desk.read(self.step + 1, self._kv_tokens):
            self.view.note(told)
        self._collect()
        while self._refill():  # groups were filtered after the engines had stopped
            self._collect()
        trained = self.ledger.enough() or self.ledger.ready()
        groups = {group: self.scored.pop(group) for group in trained}
        batch = sorted([s for members in groups.values() for s in members] + self._ended_now, key=lambda one: one.id)
        self._ended_now, self._filtered_now = [], 0
        self._say(batch)
        with self.cards.meanwhile(self._attend):
            self.updater.train(groups, self.ledger.version, metrics)
        for group in trained:
            self.folder.log_groups(self.step + 1, [group], "trained", self.ledger.lag(group))
        self.ledger.train(trained)
        self._say_ages(groups)
        self.ledger.advance()
        seconds = time.perf_counter() - start
        metrics.update(throughput(sum(sample.tokens for sample in batch), seconds, self.config.cluster.npus))
        metrics.add("timing_s/step", seconds)
        self._take(self.scorer.reports())
        metrics.update(self.usage.count(self.cards.settled_ns))
        metrics.update(self.ledger.metrics() | self.source.metrics() | self.memory.metrics() | self.queue.stats())
        self.metrics = Metrics()
        return self.pace.count(metrics.result())

    def evaluate(self, prompts: Sequence[Prompt], when: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Answers held-out prompts once with the present weights: `val/rewards/<when>` and one row a prompt.

        Noise is keyed by the prompt, so two evaluations differ by the weights alone. Nothing of it enters the queue.
        """
        if not prompts:
            return {}, []
        with self._aside():
            self.generation.suspend()
            self._switch("infer")
            outputs = self.generation.answer(prompts, self.desk.share.engines)
            self._switch("train")
            outcomes = self.scorer.answers(prompts, outputs)
            self._take(self.scorer.reports())
        rows = [
            {"prompt": prompt.text, "response": text, "reward": outcome.reward}
            for prompt, (text, outcome) in zip(prompts, outcomes, strict=True)
        ]
        known = [outcome.reward for _, outcome in outcomes if outcome.reward is not None]
        if known:
            self.held_out[when] = sum(known) / len(known)
        return ({f"val/rewards/{when}": self.held_out[when]} if known else {}), rows

    def notes(self) -> list[str]:
        """What a user should hear of at the end."""
        held_out = [f"{self.held_out[when]:.3f} {when}" for when in ("before", "after") if when in self.held_out]
        lost = {name: count for name, count in self.ledger.ended.items() if name != "trained"}
        lines = self.pace.notes()
        lines += [f"reward on held-out prompts: {', '.join(held_out)} (val/rewards)"] if held_out else []
        lines += [f"{count} groups {name}" for name, count in lost.items()]
        if left := len(self.ledger.in_flight) + len(self.ledger.finished):
            lines.append(f"{left} groups are under way, and in the last checkpoint")
        if self.failed_rewards:
            lines.append(f"{self.failed_rewards} samples could not be scored and were not trained (reward/failed)")
        skipped = self.source.metrics().get("data/skipped_prompts", 0)
        return lines + ([f"{skipped:.0f} prompts were longer than data.max_prompt_length"] if skipped else [])

    def cut(self) -> str:
        """One cut through weights, queue, and what is under way, for `save`. The cards' part is copied and the queue's
        written; the controller's is returned."""
        self.view.phase("save")
        with self.saver.pause():
            self._settle()
            snapshot = self.cards.begin("snapshot", ranks=self.spec.deployment.train)
            state = savepoint.begin(self.checkpoint, self)
            self.cards.wait(snapshot)
        return state

    def save(self, cut: str) -> None:
        """Has a checkpoint written from which a run of the same name goes on, and the Hugging Face export beside it.
        Steps go on meanwhile."""
        target, export, ranks = self.checkpoint, str(self.folder.hf), self.spec.deployment.train

        def write() -> None:
            self.cards.call("save", str(target / savepoint.TRAINER), export, ranks=ranks)
            savepoint.finish(target, cut)
            savepoint.prune(target.parent, self.config.run.keep)

        self.saver.begin(write)

    @property
    def checkpoint(self) -> Path:
        """The folder of the present step's."""
        return self.folder.checkpoints / f"step-{self.step}"

    def _settle(self) -> None:
        """Nothing is on an engine, and what was on its way through the queue has arrived and is scored."""
        self._suspend()
        while self.generation.buffer.of("running"):  # finished, and on their way through the queue
            self._note(*self.scorer.news(LOOK_S))
        scored, reports = self.scorer.judge()
        self._take(reports)
        self._note([], scored)
        while self.scorer.unscored:
            self._note(*self.scorer.news(LOOK_S))

    def restore(self, checkpoint: Path) -> None:
        savepoint.read(checkpoint, self)
        self.folder.rewind(self.step)
        self.cards.call("restore", str(checkpoint / savepoint.TRAINER), ranks=self.spec.deployment.train)

    def _collect(self) -> None:
        """The weights of the present version go to the engines, which go on until a step's groups are there; then the
        cards that train have them back, and everything that is finished is scored."""
        with self.metrics.timer("switch"):
            self._publish()
        self._admit(self.desk.share.engines)
        self.generation.resume(self.desk.share.engines)
        with self.metrics.timer("gen"):
            self._generate()
            self._stop_sharing()
        with self.metrics.timer("switch"):
            self._switch("train")
        self.view.phase("reward")
        with self.metrics.timer("reward"):
            scored, reports = self.scorer.judge()
        self._take(reports)
        self._note([], scored)

    def _publish(self) -> None:
        """The engines get the weights of the present version. Those on cards that only generate go on meanwhile."""
        share, cards = self.desk.share, self.spec.deployment.actor
        if beside := self.generation.go_on_beside(share.engines):
            self.view.phase("send weights")
            arrives = self.cards.begin("receive", self.ledger.version, share, ranks=beside)
            others = [rank for rank in cards if rank not in beside]
            self._take(self.cards.call("switch", "infer", self.ledger.version, share, True, ranks=others))
            self._take(self.cards.wait(arrives))
        else:
            self._suspend()
            self._switch("infer")

    def _admit(self, engines: Sequence[int] | None = None) -> None:
        """Takes up as many groups as the ledger allows, the run has steps left for, and these engines (None: those that
        run) can begin with."""
        untrained = len(self.ledger.in_flight) + len(self.ledger.finished)
        wanted = (self.config.run.steps - self.step) * self.ledger.expected_groups - untrained
        most, begun = self.ledger.may_admit(), self.generation.groups_wanted(engines)
        wanted = min(wanted, most, most if begun is None else begun)
        prompts = self.source.next(wanted) if wanted > 0 else []
        self.ledger.admit([prompt.id for prompt in prompts])
        self.scorer.expect(prompts)
        self.generation.admit(prompts)

    def _refill(self) -> bool:
        """Whether a step that lacks groups because some were filtered is to go on for others in their place."""
        batch = self.config.data.prompts_per_step
        wanted = 0 < self._filtered_now <= MOST_REFILLS * batch and not self.ledger.enough()
        return wanted and bool(self.ledger.in_flight or self.ledger.may_admit())

    def _generate(self) -> None:
        """Until a step's groups are finished, and the oldest that must be trained in this version are among them."""
        heard_s, few = time.perf_counter(), TAIL * self.ledger.expected_groups * self.group_size
        while not self.ledger.enough() and (self.ledger.in_flight or self._more_tokens()):
            sizes = len(self.ledger.ready()), self.ledger.expected_groups
            self.view.phase("generate", *(groups * self.group_size for groups in sizes))
            began_s, waits = time.perf_counter(), self.ledger.waits_for_older
            tail = len(self.generation.buffer.of("running")) <= few
            arrived, scored = self.scorer.news(LOOK_S)
            self._note(arrived, scored)
            self._feed()
            self.cards.check()
            heard_s = time.perf_counter() if arrived or scored else heard_s
            self.generation.check_alive(time.perf_counter() - heard_s)
            if self._refill() and self.ledger.may_admit():
                self._admit()
                self.generation.hand_over()
            for name, holds in (("wait_older", waits), ("gen_tail", tail)):
                self.metrics.add(f"timing_s/{name}", (time.perf_counter() - began_s) * holds)

    def _attend(self) -> None:
        """While some cards train, others generate."""
        self._note(*self.scorer.news(0.0))
        self._feed()

    def _feed(self) -> None:
        if self.generation.hungry:
            self._admit()
            self.generation.hand_over()

    def _more_tokens(self) -> bool:
        """Whether groups that were shorter than others before them have left a step short of tokens, and further ones
        have been admitted."""
        if self.config.stalesync.train_tokens is not None:
            self._admit()
            self.generation.hand_over()
        return bool(self.ledger.in_flight)

    def _note(self, arrived: Sequence[Finished], scored: Sequence[Scored]) -> None:
        """Takes notice of samples that are generated, and of others that are scored."""
        for sample in arrived:
            self.generation.buffer.finish(sample.id, sample.response_tokens)
            group = sample.prompt.id
            if self.generation.buffer.is_finished(group):
                left = self.generation.leave(group)
                if not self.scorer.beside:
                    self.ledger.finish(group, sum(one.prompt_tokens + one.generated for one in left))
        for one in scored:
            group = one.prompt.id
            members = self.scored.setdefault(group, [])
            members.append(one)
            if len(members) == self.group_size:
                self._judge(group, members)

    def _judge(self, group: str, members: list[Scored]) -> None:
        """A group is scored: it can be trained, or has failed."""
        self.scorer.forget(group)
        errors = [member.outcome.error for member in members]
        self.failed_rewards += sum(error is not None for error in errors)
        if all(errors):
            self.ledger.fail(group, f"reward_{errors[0]}")
            self._let_go(group, f"failed:reward_{errors[0]}", f"reward_{errors[0]}")
        elif rule := self.algorithm.filter_rule([member.outcome.reward for member in members]):
            self.ledger.filter(group, rule)
            self._let_go(group, f"filtered:{rule}", rule)
            self._filtered_now += 1
        elif self.scorer.beside:
            self.ledger.finish(group, sum(member.tokens for member in members if member.outcome.error is None))

    def _let_go(self, group: str, ended: str, reason: str) -> None:
        """A group that will not be trained leaves the queue."""
        self.folder.log_groups(self._row, [group], ended)
        members = self.scored.pop(group)
        self.queue.drop([member.id for member in members], reason)
        self._ended_now += members

    def _stop_sharing(self) -> None:
        """Engines whose cards train now are suspended; those that go on get what these leave."""
        shared = self.generation.of_cards(self.spec.deployment.shared)
        self._suspend(shared)
        if shared:
            self.generation.hand_over()

    def _suspend(self, engines: Sequence[int] | None = None) -> None:
        unfinished = self.generation.suspend(engines)
        self.metrics.add("rollout/suspended_total", unfinished)

    def _switch(self, phase: str) -> None:
        self.view.phase(f"switch to {phase}")
        ranks = self.spec.deployment.actor if phase == "infer" else self.spec.deployment.train
        self._take(self.cards.call("switch", phase, self.ledger.version, self.desk.share, ranks=ranks))

    def _say(self, scored: list[Scored]) -> None:
        metrics = self.metrics
        metrics.add("rollout/engines", len(self.desk.share.engines))
        self._kv_tokens = metrics.result().get("rollout/kv_tokens_min", self._kv_tokens)
        metrics.update(reward_metrics([sample.outcome for sample in scored]))
        if not scored:
            return
        metrics.spread("response_length", [sample.response_tokens for sample in scored])
        metrics.spread("prompt_length", [sample.prompt_tokens for sample in scored])
        longest = self.config.rollout.max_response_length
        metrics.add("response_length/clip_ratio", sum(s.response_tokens >= longest for s in scored) / len(scored))
        rows = [{"prompt": s.prompt.text, "response": s.response, "reward": s.outcome.reward} for s in scored]
        self.folder.log_samples(self.step + 1, rows)

    def _say_ages(self, groups: dict[str, list[Scored]]) -> None:
        """How many versions the oldest token of every trained sample lags behind, and how many samples are of several
        versions."""
        samples = [sample for members in groups.values() for sample in members if sample.outcome.error is None]
        bound = self.config.stalesync.max_staleness
        lags = [self.ledger.version - sample.oldest for sample in samples]
        assert max(lags, default=0) <= bound, f"a sample {max(lags)} versions old was trained; the bound is {bound}"
        for lag in range(bound + 1):
            self.metrics.add(f"staleness/lag_{lag}_count", lags.count(lag))
        self.metrics.add("staleness/mixed_versions_count", sum(s.newest > s.oldest for s in samples))

    def _take(self, reports: Sequence[StageReport]) -> None:
        for report in reports:
            self.metrics.merge(report.metrics)
            self.memory.merge(report.memory)
            self.folder.log_spans(report.spans)
            self.usage.add(report.spans)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is measured inside is nobody's step."""
        kept, self.metrics = self.metrics, Metrics()
        try:
            yield
        finally:
            self.metrics = kept
