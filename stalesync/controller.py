"""The loop. It handles metadata only: ids, lengths, rewards; tensors pass from card to card through the queue.

    prompts ─admit─► [switch] ─► generate ─► [switch] ─► reward ─► advantages ─► reference ─► train ─► publish ─► …
                                 │  ▲ suspended           ▲                        │           │
                                 │  └──────┐              │                        │           │
                                 └──────── queue ─────────┘──────── queue ────────►└── queue ──┘
             └──────────────────── Collector ────────────────────┘└──────────── Updater ────────────┘

One loop for every staleness and every deployment: what may start and what may be trained is the ledger's to say
(`staleness.py`), which cards a stage concerns is the deployment's. At staleness 0 the ledger says: this version's
batch, all of it; then nothing is ever suspended. At s > 0 a step begins when enough groups are finished; engines on
cards that train are suspended for it, the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distqueue import DistQueue
from fusion.colocate import Worker, WorkerSpec
from fusion.telemetry import Answer, LiveView, RunFolder, compare, throughput
from fusion.training.algorithms import make_algorithm
from stalesync import savepoint
from stalesync.cards import Cards
from stalesync.collecting import Collector
from stalesync.config import Config
from stalesync.control import ControlDesk
from stalesync.figures import tell_ages, tell_samples
from stalesync.generation import Generation
from stalesync.groups import Groups
from stalesync.pacing import PaceTally
from stalesync.prompts import Prompt, PromptSource
from stalesync.record import StepRecord
from stalesync.samples import ScoredSample
from stalesync.saving import Saver
from stalesync.scoring import Scorer
from stalesync.staleness import StalenessLedger
from stalesync.update import Updater

TASKS = ("reward", "train")
"""Who must acknowledge a sample before the queue frees it."""


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

    def __post_init__(self) -> None:
        config, spec, cards = self.config, self.spec, self.cards
        stale, size = config.stalesync, config.algorithm.group_size
        self.ledger = StalenessLedger(stale.max_staleness, config.data.prompts_per_step, stale.train_tokens)
        self.desk = ControlDesk(self.folder.path, config)
        self.record = StepRecord(spec.world, self.folder)
        self.generation = Generation(spec, cards, size, self.record.take)
        algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
        self.groups = Groups(size, self.ledger, self.generation, self.scorer, algorithm, self.queue, self.folder)
        parts = self.ledger, self.generation, self.groups, self.record
        self.collector = Collector(config, spec, cards, self.source, self.scorer, self.view, *parts)
        self.updater = Updater(
            spec=spec,
            cards=cards,
            queue=self.queue,
            view=self.view,
            algorithm=algorithm,
            record_reports=self.record.take,
        )
        self.saver = Saver()
        cards.health_checks.append(self.saver.check)
        self.pace = PaceTally(spec.pace)
        self._kv_tokens: float | None = None

    def run(self) -> list[Answer]:
        """All steps that are left; returns answers to held-out prompts before and after. The cards are in the training
        phase at both ends."""
        last, every = self.config.run.steps, self.config.run.save_every or self.config.run.steps
        held_out = self.source.evaluation(self.config.run.eval_prompts) if self.config.run.eval_prompts else []
        extra, before = self.evaluate(held_out, "before")
        after: list[dict[str, Any]] = []
        self.view.begin()
        self.record.begin()
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
        metrics, start = self.record.metrics, time.perf_counter()
        self.groups.row = self.step + 1
        if told := self.desk.read(self.step + 1, self._kv_tokens):
            self.view.note(told)
        self.collector.collect(self.config.run.steps - self.step, self.desk.share)
        trained = self.ledger.enough() or self.ledger.ready()
        groups, batch = self.groups.take(trained)
        self._say(batch)
        with self.cards.polling(self.collector.attend):
            self.updater.train(groups, self.ledger.version, metrics)
        for group in trained:
            self.folder.log_groups(self.step + 1, [group], "trained", self.ledger.lag(group))
        self.ledger.train(trained)
        tell_ages(metrics, groups, self.ledger.version, self.config.stalesync.max_staleness)
        self.ledger.advance()
        seconds = time.perf_counter() - start
        metrics.update(throughput(sum(sample.tokens for sample in batch), seconds, self.config.cluster.npus))
        metrics.add("timing_s/step", seconds)
        self.record.take(self.scorer.take_reports())
        figures = self.ledger.metrics() | self.source.metrics() | self.queue.stats()
        return self.pace.count(self.record.close(self.cards.reported_until_ns, figures))

    def evaluate(self, prompts: Sequence[Prompt], when: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Answers held-out prompts once with the present weights: `val/rewards/<when>` and one row a prompt.

        Noise is keyed by the prompt, so two evaluations differ by the weights alone. Nothing of it is trained: no task
        of the queue gets it.
        """
        if not prompts:
            return {}, []
        with self.record.aside():
            answers = self.collector.answer(prompts, self.desk.share)
            outcomes = self.scorer.score_answers(prompts, answers)
            self.record.take(self.scorer.take_reports())
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
            self.collector.settle()
            snapshot = self.cards.on(self.spec.deployment.train).begin(Worker.snapshot)
            state = savepoint.begin(self.checkpoint, self)
            self.record.take(self.cards.wait(snapshot))
        return state

    def save(self, cut: str) -> None:
        """Has a checkpoint written from which a run of the same name goes on, and the Hugging Face export beside it.
        Steps go on meanwhile."""
        target, export, trainers = self.checkpoint, str(self.folder.hf), self.cards.on(self.spec.deployment.train)

        def write() -> None:
            trainers.call(Worker.save, str(target / savepoint.TRAINER), export)
            savepoint.finish(target, cut)
            savepoint.prune(target.parent, self.config.run.keep)

        self.saver.begin(write)

    @property
    def checkpoint(self) -> Path:
        """The folder of the present step's."""
        return self.folder.checkpoints / f"step-{self.step}"

    def restore(self, checkpoint: Path) -> None:
        savepoint.read(checkpoint, self)
        self.folder.rewind(self.step)
        self.cards.on(self.spec.deployment.train).call(Worker.restore, str(checkpoint / savepoint.TRAINER))

    def _say(self, scored: list[ScoredSample]) -> None:
        metrics = self.record.metrics
        metrics.add("rollout/engines", len(self.desk.share.engines))
        self._kv_tokens = metrics.result().get("rollout/kv_tokens_min", self._kv_tokens)
        tell_samples(metrics, scored, self.config.rollout.max_response_length)
        if scored:
            rows = [{"prompt": s.prompt.text, "response": s.response, "reward": s.outcome.reward} for s in scored]
            self.folder.log_samples(self.step + 1, rows)
