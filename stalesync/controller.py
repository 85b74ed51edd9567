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
from fusion.colocate import InferenceShare, StageReport, WorkerSpec
from fusion.telemetry import Answer, LiveView, MemoryLedger, Metrics, RunFolder, Usage, compare, throughput, wall_ns
from fusion.training.algorithms import make_algorithm
from stalesync import savepoint
from stalesync.cards import Cards
from stalesync.config import Config
from stalesync.control import ControlDesk
from stalesync.figures import tell_ages, tell_samples
from stalesync.generation import Generation
from stalesync.groups import Groups
from stalesync.pacing import PaceTally
from stalesync.prompts import Prompt, PromptSource
from stalesync.saving import Saver
from stalesync.scoring import Scored, Scorer
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
    held_out: dict[str, float] = field(default_factory=dict)
    """Mean reward on the held-out prompts, before and after."""
    memory: MemoryLedger = field(default_factory=MemoryLedger)

    def __post_init__(self) -> None:
        config, spec = self.config, self.spec
        stale = config.stalesync
        self.ledger = StalenessLedger(stale.max_staleness, config.data.prompts_per_step, stale.train_tokens)
        self.desk = ControlDesk(self.folder.path, config)
        self.group_size = config.algorithm.group_size
        self.generation = Generation(spec, self.cards, self.group_size, self._take)
        algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
        parts = self.ledger, self.generation, self.scorer, algorithm, self.queue, self.folder
        self.groups = Groups(self.group_size, *parts)
        self.updater = Updater(spec, self.cards, self.queue, self.view, algorithm, self._take)
        self.saver = Saver()
        self.cards.heed.append(self.saver.check)
        self.metrics = Metrics()
        self.pace = PaceTally(spec.pace)
        self.usage = Usage([f"card {rank}" for rank in range(spec.world)], wall_ns())
        self._kv_tokens: float | None = None
        self._share: InferenceShare | None = None
        """What the engines were set up with"""

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
        self.groups.row = self.step + 1
        if told := self.desk.read(self.step + 1, self._kv_tokens):
            self.view.note(told)
        self._collect()
        while self._refill():  # groups were filtered after the engines had stopped
            self._collect()
        trained = self.ledger.enough() or self.ledger.ready()
        groups, batch = self.groups.take(trained)
        self._say(batch)
        with self.cards.meanwhile(self._attend):
            self.updater.train(groups, self.ledger.version, metrics)
        for group in trained:
            self.folder.log_groups(self.step + 1, [group], "trained", self.ledger.lag(group))
        self.ledger.train(trained)
        tell_ages(metrics, groups, self.ledger.version, self.config.stalesync.max_staleness)
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
        if self.groups.failed_rewards:
            lines.append(
                f"{self.groups.failed_rewards} samples could not be scored and were not trained (reward/failed)"
            )
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
            self._take(self.cards.wait(snapshot))
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
            self.groups.note(*self.scorer.news(LOOK_S))
        scored, reports = self.scorer.judge()
        self._take(reports)
        self.groups.note([], scored)
        while self.scorer.unscored:
            self.groups.note(*self.scorer.news(LOOK_S))

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
        self.groups.note([], scored)

    def _publish(self) -> None:
        """The engines get the weights of the present version. Those on cards that only generate go on meanwhile."""
        share, cards = self.desk.share, self.spec.deployment.actor
        unchanged, self._share = share == self._share, share
        if unchanged and (beside := self.generation.go_on_beside(share.engines)):
            self.view.phase("send weights")
            arrives = self.cards.begin("receive", self.ledger.version, share, ranks=beside)
            others = [rank for rank in cards if rank not in beside]
            self._take(self.cards.call("switch", "infer", self.ledger.version, share, True, ranks=others))
            reports = self.cards.wait(arrives)
            self._take(reports)
            self.generation.told(min(report.until_ns for report in reports))
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
        wanted = 0 < self.groups.filtered <= MOST_REFILLS * batch and not self.ledger.enough()
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
            self.groups.note(arrived, scored)
            chunks = self._feed()
            self.cards.check()
            heard_s = time.perf_counter() if arrived or scored or chunks else heard_s
            self.generation.check_alive(time.perf_counter() - heard_s)
            if self._refill() and self.ledger.may_admit():
                self._admit()
                self.generation.hand_over()
            for name, holds in (("wait_older", waits), ("gen_tail", tail)):
                self.metrics.add(f"timing_s/{name}", (time.perf_counter() - began_s) * holds)

    def _attend(self) -> None:
        """While some cards train, others generate."""
        self.groups.note(*self.scorer.news(0.0))
        self._feed()

    def _feed(self) -> int:
        """What ended with its chunk goes on where there is room, and engines that run low get more. Returns how many
        chunks have ended."""
        chunks = self.generation.gather()
        self.metrics.add("rollout/chunks_total", chunks)
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
        self.metrics.add("rollout/suspended_total", unfinished)

    def _switch(self, phase: str) -> None:
        self.view.phase(f"switch to {phase}")
        ranks = self.spec.deployment.actor if phase == "infer" else self.spec.deployment.train
        self._take(self.cards.call("switch", phase, self.ledger.version, self.desk.share, ranks=ranks))

    def _say(self, scored: list[Scored]) -> None:
        self.metrics.add("rollout/engines", len(self.desk.share.engines))
        self._kv_tokens = self.metrics.result().get("rollout/kv_tokens_min", self._kv_tokens)
        tell_samples(self.metrics, scored, self.config.rollout.max_response_length)
        if scored:
            rows = [{"prompt": s.prompt.text, "response": s.response, "reward": s.outcome.reward} for s in scored]
            self.folder.log_samples(self.step + 1, rows)

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
