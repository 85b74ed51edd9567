"""The loop. It handles metadata only: ids, lengths, rewards; tensors pass from card to card through the queue.

    prompts ─admit─► [switch] ─► generate ─► [switch] ─► reward ─► advantages ─► reference ─► train ─► publish ─► …
                                    │                      ▲                        │           │
                                    └──────── queue ───────┘──────── queue ────────►└── queue ──┘

One loop for every staleness and every deployment: what may start and what may be trained is the ledger's to say
(`staleness.py`), which cards a stage concerns is the deployment's. At staleness 0 the ledger says: this version's
batch, all of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distqueue import DistQueue, PackedBatch
from fusion.colocate import StageReport, WorkerSpec
from fusion.inference import Output, Request
from fusion.rewards import reward_metrics
from fusion.rollout import assign_groups
from fusion.telemetry import Answer, LiveView, MemoryLedger, Metrics, RunFolder, compare, throughput
from fusion.training import split_over_ranks
from fusion.training.algorithms import make_algorithm
from stalesync.cards import Cards
from stalesync.config import Config
from stalesync.control import ControlDesk
from stalesync.prompts import Prompt, PromptSource
from stalesync.scoring import Scored, Scorer
from stalesync.staleness import StalenessLedger

log = logging.getLogger(__name__)

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
    failed_rewards: int = 0
    held_out: dict[str, float] = field(default_factory=dict)
    """Mean reward on the held-out prompts, before and after."""
    memory: MemoryLedger = field(default_factory=MemoryLedger)

    def __post_init__(self) -> None:
        self.ledger = StalenessLedger(self.config.stalesync.max_staleness, self.config.data.prompts_per_step)
        self.sampling = self.config.rollout.sampling()
        self.algorithm = make_algorithm(self.config.algorithm, self.config.rollout.max_response_length)
        self.deployment = self.spec.deployment
        self.desk = ControlDesk(self.folder.path, self.config)
        self._kv_tokens: float | None = None

    def run(self) -> list[Answer]:
        """All steps that are left; returns answers to held-out prompts before and after. The cards are in the training
        phase at both ends."""
        last, every = self.config.run.steps, self.config.run.save_every
        held_out = self.source.evaluation(self.config.run.eval_prompts) if self.config.run.eval_prompts else []
        extra, before = self.evaluate(held_out, "before")
        after: list[dict[str, Any]] = []
        self.view.begin()
        while self.step < last:
            metrics = self.train_step() | extra
            self.step += 1
            extra = {}
            if self.step == last:
                extra, after = self.evaluate(held_out, "after")
            self.folder.log(self.step, metrics | extra)
            self.view.update(self.step, metrics)
            if self.step == last or (every and self.step % every == 0):
                self.save()
        return compare(before, after)

    def train_step(self) -> dict[str, float]:
        metrics, start = Metrics(), time.perf_counter()
        if told := self.desk.read(self.step + 1, self._kv_tokens):
            self.view.note(told)
        with metrics.timer("switch"):
            self._switch("infer", metrics)
        prompts = {prompt.id: prompt for prompt in self.source.next(self.ledger.may_admit())}
        self.ledger.admit(prompts)
        self.scorer.start(prompts)
        with metrics.timer("gen"):
            self._generate(list(prompts.values()), metrics)
        with metrics.timer("switch"):
            self._switch("train", metrics)
        self.view.phase("reward")
        with metrics.timer("reward"):
            scored, reports = self.scorer.finish()
        self._take(reports, metrics)
        with metrics.timer("adv"):
            kept = self._advantages(scored, metrics)
        self._update(kept, metrics)
        self.ledger.advance()
        seconds = time.perf_counter() - start
        tokens = sum(sample.prompt_tokens + sample.response_tokens for sample in scored)
        metrics.update(throughput(tokens, seconds, self.config.cluster.npus))
        metrics.add("timing_s/step", seconds)
        metrics.update(self.ledger.metrics() | self.source.metrics() | self.memory.metrics() | self.queue.stats())
        return metrics.result()

    def evaluate(self, prompts: Sequence[Prompt], when: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Answers held-out prompts once with the present weights: `val/rewards/<when>` and one row a prompt.

        Noise is keyed by the prompt, so two evaluations differ by the weights alone. Nothing of it enters the queue.
        """
        if not prompts:
            return {}, []
        self._switch("infer", Metrics())
        requests = {prompt.id: [self._request(prompt, prompt.id)] for prompt in prompts}
        outputs = {output.request_id: output for output in self._engines(requests, keep=True)}
        self._switch("train", Metrics())
        outcomes = self.scorer.answers(prompts, outputs)
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
        lines = [f"reward on held-out prompts: {', '.join(held_out)} (val/rewards)"] if held_out else []
        lines += [f"{count} groups {name}" for name, count in lost.items()]
        if self.failed_rewards:
            lines.append(f"{self.failed_rewards} samples could not be scored and were not trained (reward/failed)")
        skipped = self.source.metrics().get("data/skipped_prompts", 0)
        return lines + ([f"{skipped:.0f} prompts were longer than data.max_prompt_length"] if skipped else [])

    def save(self) -> None:
        """A checkpoint from which a run of the same name goes on, and the Hugging Face export beside it."""
        self.view.phase("save")
        target = self.folder.checkpoints / f"step-{self.step}"
        self.cards.call("save", str(target), str(self.folder.hf), ranks=self.deployment.train)
        state = {"step": self.step, "prompts": self.source.state_dict(), "ended": dict(self.ledger.ended)}
        state["share"] = self.desk.changed
        (target / "controller.json.partial").write_text(json.dumps(state))
        (target / "controller.json.partial").rename(target / "controller.json")

    def restore(self, checkpoint: Path) -> None:
        state = json.loads((checkpoint / "controller.json").read_text())
        self.step = self.ledger.version = state["step"]
        self.source.load_state_dict(state["prompts"])
        self.ledger.ended.update(state["ended"])
        self.desk.restore(state.get("share"))
        self.cards.call("restore", str(checkpoint), ranks=self.deployment.train)

    def _switch(self, phase: str, metrics: Metrics) -> None:
        self.view.phase(f"switch to {phase}")
        ranks = self.deployment.actor if phase == "infer" else self.deployment.train
        self._take(self.cards.call("switch", phase, self.ledger.version, self.desk.share, ranks=ranks), metrics)

    def _generate(self, prompts: Sequence[Prompt], metrics: Metrics) -> None:
        """Every sample of every group; the cards put them to the queue as they finish."""
        self.view.phase("generate", total=len(prompts) * self.config.algorithm.group_size)
        members = range(self.config.algorithm.group_size)
        requests = {prompt.id: [self._request(prompt, f"{prompt.id}/{k}") for k in members] for prompt in prompts}
        self._engines(requests, keep=False, metrics=metrics)

    def _engines(self, requests: dict[str, list[Request]], keep: bool, metrics: Metrics | None = None) -> list[Output]:
        """Deals groups of requests out to the engines and runs them to the end; with ``keep`` the outputs come back."""
        engines = [self.spec.engines[number] for number in self.desk.share.engines]
        load = {group: sum(len(request.prompt) for request in members) for group, members in requests.items()}
        each: list[tuple] = [([], keep)] * self.spec.world
        for ranks, groups in zip(engines, assign_groups(load, len(engines)), strict=True):
            each[ranks[0]] = ([request for group in groups for request in requests[group]], keep)
        reports = self.cards.call("generate", each=each, ranks=[rank for ranks in engines for rank in ranks])
        if metrics is not None:
            self._take(reports, metrics)
            metrics.add("rollout/engines", len(engines))
            self._kv_tokens = metrics.result()["rollout/kv_tokens_min"]
        return [output for report in reports for output in report.outputs]

    def _advantages(self, scored: list[Scored], metrics: Metrics) -> list[Scored]:
        """Puts advantages to the queue; returns what is trained. What could not be scored is dropped, by name."""
        self._say(scored, metrics)
        groups: dict[str, list[Scored]] = {}
        for sample in scored:
            groups.setdefault(sample.prompt.id, []).append(sample)
        for group, members in groups.items():
            errors = [member.outcome.error for member in members]
            if all(errors):
                self.ledger.fail(group, f"reward_{errors[0]}")
            elif rule := self.algorithm.filter_rule([member.outcome.reward for member in members]):
                self.ledger.filter(group, rule)
                self.queue.drop([member.id for member in members if not member.outcome.error], rule)
            else:
                self.ledger.finish(group)
        for sample in scored:
            if sample.outcome.error:
                self.queue.drop([sample.id], f"reward_{sample.outcome.error}")
                self.failed_rewards += 1
        finished = self.ledger.finished
        kept = [sample for sample in scored if sample.outcome.error is None and sample.prompt.id in finished]
        if kept:
            kl = self._reference(_deal(kept, self._reference_replicas), metrics) if self._kl_in == "reward" else {}
            values, _ = self.algorithm.advantages(
                [s.outcome.reward for s in kept],
                [s.prompt.id for s in kept],
                [s.response_tokens for s in kept],
                [kl[s.id] for s in kept] if kl else None,
            )
            self.queue.put(PackedBatch.from_samples([sample.id for sample in kept], {"advantage": values}))
            metrics.spread("critic/advantages", values.tolist())
        return kept

    def _update(self, kept: list[Scored], metrics: Metrics) -> None:
        """Reference log-probabilities, then the minibatches, each dealt out over the data-parallel replicas."""
        trained = self.ledger.ready()
        members = {group: [sample for sample in kept if sample.prompt.id == group] for group in trained}
        minibatches = [
            _deal([sample for group in groups for sample in members[group]], self.spec.train.dp)
            for groups in _chunks(trained, self.config.algorithm.minibatches)
        ]
        if not minibatches:
            log.warning("step %d: no group is left, nothing is trained", self.step + 1)
            return
        if self._kl_in == "loss":
            self._reference(self._shares_of_reference(minibatches, members), metrics)
        self.view.phase("train")
        ids = [sample.id for group in trained for sample in members[group]]
        leased = self.queue.get("train", ["advantage"], count=len(ids))
        assert set(leased.ids) == set(ids), "the queue hands out other samples than the ledger lets train"
        with metrics.timer("train"):
            self._take(self.cards.call("train", minibatches, self.ledger.version, ranks=self.deployment.train), metrics)
        self.queue.ack("train", ids)
        self.ledger.train(trained)

    @property
    def _kl_in(self) -> str | None:
        return self.config.algorithm.kl_in if self.config.algorithm.kl_coef > 0 else None

    @property
    def _reference_replicas(self) -> int:
        return (self.spec.reference or self.spec.train).dp

    def _reference(self, shares: list[list[str]], metrics: Metrics) -> dict[str, float]:
        """Reference log-probabilities of samples; each one's KL, where rewards are made of it."""
        self.view.phase("reference")
        with metrics.timer("ref"):
            reports = self.cards.call("reference", shares, ranks=self.deployment.reference)
        self._take(reports, metrics)
        return {id: kl for report in reports for id, kl in report.reference_kl.items()}

    def _shares_of_reference(
        self, minibatches: list[list[list[str]]], members: dict[str, list[Scored]]
    ) -> list[list[str]]:
        """Ids by replica of the reference: as they are trained where it computes in the training layout."""
        if self.spec.reference is None:
            return [[id for shares in minibatches for id in shares[dp]] for dp in range(self.spec.train.dp)]
        return _deal([sample for group in members.values() for sample in group], self.spec.reference.dp)

    def _say(self, scored: list[Scored], metrics: Metrics) -> None:
        metrics.update(reward_metrics([sample.outcome for sample in scored]))
        metrics.spread("response_length", [sample.response_tokens for sample in scored])
        metrics.spread("prompt_length", [sample.prompt_tokens for sample in scored])
        longest = self.config.rollout.max_response_length
        metrics.add("response_length/clip_ratio", sum(s.response_tokens >= longest for s in scored) / len(scored))
        rows = [{"prompt": s.prompt.text, "response": s.response, "reward": s.outcome.reward} for s in scored]
        self.folder.log_samples(self.step + 1, rows)

    def _take(self, reports: Sequence[StageReport], metrics: Metrics) -> None:
        for report in reports:
            metrics.merge(report.metrics)
            self.memory.merge(report.memory)
            self.folder.log_spans(report.spans)

    def _request(self, prompt: Prompt, id: str) -> Request:
        return Request(id=id, group=prompt.id, prompt=prompt.ids, params=self.sampling)


def _deal(samples: list[Scored], replicas: int) -> list[list[str]]:
    """Sample ids for each data-parallel replica, balanced by tokens."""
    shares = split_over_ranks([sample.prompt_tokens + sample.response_tokens for sample in samples], replicas)
    return [[samples[index].id for index in share] for share in shares]


def _chunks(groups: list[str], count: int) -> list[list[str]]:
    """``groups`` in ``count`` runs as even as they go; fewer where there are fewer groups."""
    size = -(-len(groups) // count) if groups else 1
    return [groups[start : start + size] for start in range(0, len(groups), size)]
