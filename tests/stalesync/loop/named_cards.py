"""The whole controller with its real parts, over cards and a queue that only hold names.

    real    Controller ─ Admission (ledger, buffer) ─ Groups ─ Scorer ─ Generation ─ Updater ─ metrics ─ files
                 │                                        │
    fake    NamedCards: what each engine has          NamedQueue: what is generated

A step's samples arrive in messages of 64, the smallest that the scorer takes at a time; every message is a look at the
cards. What is not there: Ray, the queue's client, the reward's own processes, tokenisation. ``uncounted`` is entered
around what the fakes do, so that a benchmark can leave it out.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from distqueue import PackedBatch
from fusion.colocate import Deployment, InferenceShare, StageReport
from fusion.inference import Request
from fusion.inference.config import RolloutConfig
from fusion.model import Parallel
from fusion.rewards import RewardOutcome
from fusion.rollout.packing import CUT, TEXT
from fusion.telemetry import MemoryLedger, RunFolder
from fusion.training import AlgorithmConfig, TrainingConfig
from fusion.training.algorithms import make_algorithm
from stalesync.job.config import Config
from stalesync.loop.controller import Controller
from stalesync.loop.engines import Engines
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.step import StepRows
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.update import Updater
from stalesync.policy.admission import Admission
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.pacing import PaceTally
from stalesync.policy.staleness import StalenessLedger
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from stalesync.scoring.scoring import RESPONSE, Scorer
from tests.stalesync.loop.fakes import Desk, View
from tests.stalesync.loop.fakes import make_controller as make_fake_controller

Uncounted = Callable[[], AbstractContextManager[None]]

GROUP_SIZE, MESSAGE = 8, 64
"""Samples of a group; samples of a message"""


CALIBRATION_BLOCKS = 2000


class Stopwatch:
    """CPU seconds of this process outside of the blocks that are not the controller's, and without its own: a reading
    of the clock takes microseconds, and there are several a group."""

    def __init__(self) -> None:
        self._outside_s = self._own_s = 0.0
        """CPU seconds in blocks; a block's own outside of it"""
        self._blocks = 0
        start_s = self.read_s()
        for _ in range(CALIBRATION_BLOCKS):
            with self.paused():
                pass
        self._own_s = (self.read_s() - start_s) / CALIBRATION_BLOCKS

    @contextmanager
    def paused(self) -> Iterator[None]:
        start_s = time.process_time()
        self._blocks += 1
        try:
            yield
        finally:
            self._outside_s += time.process_time() - start_s

    def read_s(self) -> float:
        return time.process_time() - self._outside_s - self._blocks * self._own_s


class NamedCards:
    """In place of `Cards`: engines hold ids and groups of requests until the queue takes them."""

    timeout_s, reported_until_ns = 1e9, 0

    def __init__(self, uncounted: Uncounted) -> None:
        self.uncounted, self.requests = uncounted, deque[tuple[str, str]]()
        self.version = 0
        """Policy of the engines"""
        self._poll: Any = None

    def begin_each(self, calls: Mapping[int, Any]) -> Any:
        with self.uncounted():
            (stage,) = {call.stage for call in calls.values()}
            for call in calls.values() if stage == "generate" else ():
                self._hold(call.args[0])
            return SimpleNamespace(stage=stage, ranks=tuple(calls), pending={}, reported_until_ns=0, died=False)

    def ask_each(self, calls: Mapping[int, Any]) -> list[None]:
        with self.uncounted():
            for call in calls.values():
                if call.stage == "submit":
                    self._hold(call.args[0])
            return [None] * len(calls)

    def _hold(self, requests: Sequence[Request]) -> None:
        self.requests.extend([(one.id, one.group) for one in requests])

    def wait(self, running: Any) -> list[StageReport]:
        for _ in range(4 if self._poll and running.stage == "train" else 0):
            self._poll()
        with self.uncounted():
            return [StageReport({}, [], MemoryLedger()) for _ in running.ranks]

    def wait_all(self, stages: Sequence[Any]) -> list[list[StageReport]]:
        return [self.wait(running) for running in stages]

    def check(self) -> None: ...

    def take_dead(self) -> dict[int, str]:
        return {}

    @contextmanager
    def polling(self, poll: Any) -> Iterator[None]:
        self._poll = poll
        yield
        self._poll = None

    def on(self, ranks: Sequence[int]) -> Any:
        def begin(stage: Any, *args: Any, **_: Any) -> Any:
            if args[0] == "infer":
                self.version = args[1]
            return SimpleNamespace(stage=stage.__name__, ranks=tuple(ranks), died=False)

        def call(stage: Any, *args: Any, **options: Any) -> list[StageReport]:
            return self.wait(begin(stage, *args, **options))

        return SimpleNamespace(call=call, begin=begin, ask=lambda *_: [None] * len(ranks))


class NamedQueue:
    """In place of the queue: messages of finished requests."""

    def __init__(self, uncounted: Uncounted, cards: NamedCards) -> None:
        self._uncounted, self._cards, self._random = uncounted, cards, random.Random(0)
        self.calls = 0

    def message(self) -> PackedBatch | None:
        """Return the samples that arrive next, of requests of any age; None: there are none."""
        with self._uncounted():
            held = self._cards.requests
            if not held:
                return None
            held.rotate(self._random.randrange(min(len(held), 4 * MESSAGE)))
            requests = [held.popleft() for _ in range(min(MESSAGE, len(held)))]
            ids, groups = zip(*requests, strict=True)
            texts, versions = [f"the answer is {len(id)}" for id in ids], [(self._cards.version,) * 2] * len(ids)
            batch = PackedBatch.from_samples(
                ids, {TEXT: texts, CUT: torch.zeros(len(ids), dtype=torch.bool)}, groups, versions
            )
            return replace(batch, lengths={RESPONSE: [self._random.randint(1, 500) for _ in requests]})

    def put(self, batch: PackedBatch, *, claim: str) -> None:
        self.calls += 1

    def ack(self, task: str, ids: Sequence[str]) -> None:
        self.calls += 1

    drop = ack

    def ack_with_stats(self, task: str, ids: Sequence[str]) -> dict[str, float]:
        self.calls += 1
        return {}

    def lost(self, first: int) -> list[Any]:
        return []

    def stats(self) -> dict[str, float]:
        return {}


class NamedRewards:
    """In place of a source of rewards."""

    concurrent = True

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        return [RewardOutcome(float(sample.response_tokens % 2)) for sample in samples]

    def take_reports(self) -> list[StageReport]:
        return []


class NamedScorer(Scorer):
    """A scorer whose thread is the controller's: every look scores one message."""

    def __init__(self, queue: NamedQueue) -> None:
        super().__init__(NamedRewards(), queue)  # type: ignore[arg-type]
        self._messages = queue

    def poll(self, timeout_s: float) -> Any:
        if (message := self._messages.message()) is not None:
            self._take(message)
        return super().poll(0.0)


class NamedPrompts:
    """In place of the source of prompts."""

    def __init__(self, uncounted: Uncounted) -> None:
        self._uncounted, self._taken = uncounted, 0

    def next(self, count: int) -> list[Prompt]:
        with self._uncounted():
            first, self._taken = self._taken, self._taken + count
            return [Prompt(f"e0-{first + k}", (5,) * 20, "What is 1 + 1?", "2") for k in range(count)]

    def metrics(self) -> dict[str, float]:
        return {}


def make_controller(
    groups: int,
    staleness: int,
    folder: Path,
    *,
    num_cards: int = 64,
    slots: int = 256,
    uncounted: Uncounted = nullcontext,
) -> Controller:
    """Create the controller of a run with ``groups`` prompts a step, colocated at staleness 0, else with separate cards
    that run ahead. ``slots``: requests that an engine, one a card, decodes at a time."""
    cards = NamedCards(uncounted)
    queue = NamedQueue(uncounted, cards)
    scorer, everyone = NamedScorer(queue), tuple(range(num_cards))
    deployment = Deployment(everyone if staleness == 0 else (num_cards,), everyone)
    config, rollout = Config(), RolloutConfig(max_response_length=512)
    algorithm = AlgorithmConfig(group_size=GROUP_SIZE)
    spec: Any = SimpleNamespace(
        rollout=rollout,
        seed=0,
        world=len({*deployment.train, *deployment.generate}),
        engines=[(rank,) for rank in everyone],
        deployment=deployment,
        detokenizer=None,
        turns=False,
        reward_model=None,
        reference=None,
        algorithm=algorithm,
        training=TrainingConfig(),
        train=Parallel(len(deployment.train)),
    )
    config.run.steps, config.cluster.npus, config.rollout = 1 << 20, spec.world, rollout
    config.stalesync.max_staleness = staleness
    admission_spec = AdmissionSpec(
        group_size=GROUP_SIZE,
        num_engines=num_cards,
        shared_engines=frozenset(everyone) if staleness == 0 else frozenset(),
        engine_slots=slots,
        max_response_tokens=512,
        max_filtered_groups=10 * groups,
        ahead=staleness > 0,
        filters=False,
        order=rollout.schedule.order,
    )
    admission = Admission(admission_spec, StalenessLedger(staleness, groups))
    run_folder = RunFolder(folder, f"groups-{groups}-{staleness}")
    metrics, rule, desk = StepMetrics(spec.world, run_folder), make_algorithm(algorithm, 512), Desk()
    desk.share = InferenceShare(everyone, 0.9, slots)
    parts: dict[str, Any] = dict(cards=cards, queue=queue, view=View())
    updater = Updater(spec=spec, algorithm=rule, record_reports=metrics.take, **parts)
    parts |= dict(source=NamedPrompts(uncounted), folder=run_folder, step_metrics=metrics, updater=updater)
    groups_in_progress = Groups(GROUP_SIZE, admission, scorer.prompts, rule, queue=queue, folder=run_folder)  # type: ignore[arg-type]
    generation = Generation(spec, cards, scorer.prompts, metrics.take)  # type: ignore[arg-type]
    engines = Engines(
        spec=spec,
        cards=cards,  # type: ignore[arg-type]
        queue=queue,  # type: ignore[arg-type]
        admission=admission,
        groups=groups_in_progress,
        generation=generation,
        step_metrics=metrics,
        note=print,
    )
    return make_fake_controller(
        [],
        config=config,
        spec=spec,
        admission=admission,
        scorer=scorer,
        groups=groups_in_progress,
        generation=generation,
        engines=engines,
        rows=StepRows(ledger=admission.ledger, pace=PaceTally(None), take_save_metrics=dict, **parts),
        desk=desk,
        **parts,
    )
