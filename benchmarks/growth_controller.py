"""Run the controller of a training run with cards and a queue that only hold names, and measure its CPU time.

    measured       Controller ─ Admission (ledger, buffer) ─ Groups ─ Scorer ─ Generation ─ Updater ─ metrics ─ files
                        │                                        │
    not measured   NamedCards: what each engine has          NamedQueue: what is generated

A step's samples arrive in messages of 64, the smallest that the scorer takes at a time; every message is a look at the
cards. What is outside: Ray, the queue's client, the reward's own processes, tokenisation.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from stalesync.loop.controller import Controller
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.step_rows import StepRows
from stalesync.loop.update import Updater
from stalesync.policy.admission import Admission
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.pacing import PaceTally
from stalesync.policy.staleness import StalenessLedger
from stalesync.process.garbage import collecting_seldom
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from stalesync.scoring.scoring import RESPONSE, Scorer

GROUP_SIZE, CARDS, SLOTS, MESSAGE = 8, 64, 256, 64
"""Samples of a group; cards, each an engine; requests that an engine decodes at a time; samples of a message"""

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

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.requests = watch, deque[tuple[str, str]]()
        self.version = 0
        """Policy of the engines"""
        self._poll: Any = None

    def begin_each(self, calls: Mapping[int, Any]) -> Any:
        with self.watch.paused():
            (stage,) = {call.stage for call in calls.values()}
            for call in calls.values() if stage == "generate" else ():
                self._hold(call.args[0])
            return SimpleNamespace(stage=stage, ranks=tuple(calls), pending={}, reported_until_ns=0, died=False)

    def ask_each(self, calls: Mapping[int, Any]) -> list[None]:
        with self.watch.paused():
            for call in calls.values():
                if call.stage == "submit":
                    self._hold(call.args[0])
            return [None] * len(calls)

    def _hold(self, requests: Sequence[Request]) -> None:
        self.requests.extend([(one.id, one.group) for one in requests])

    def wait(self, running: Any) -> list[StageReport]:
        for _ in range(4 if self._poll and running.stage == "train" else 0):
            self._poll()
        with self.watch.paused():
            return [StageReport({}, [], MemoryLedger()) for _ in running.ranks]

    def check(self) -> None: ...

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

    def __init__(self, watch: Stopwatch, cards: NamedCards) -> None:
        self._watch, self._cards, self._random = watch, cards, random.Random(0)
        self.calls = 0

    def message(self) -> PackedBatch | None:
        """Returns the samples that arrive next, of requests of any age; None: there are none."""
        with self._watch.paused():
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

    def put(self, batch: PackedBatch) -> None:
        self.calls += 1

    def claim(self, task: str, ids: Sequence[str]) -> None:
        self.calls += 1

    ack = drop = claim

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

    def __init__(self, watch: Stopwatch) -> None:
        self._watch, self._taken = watch, 0

    def next(self, count: int) -> list[Prompt]:
        with self._watch.paused():
            first, self._taken = self._taken, self._taken + count
            return [Prompt(f"e0-{first + k}", (5,) * 20, "What is 1 + 1?", "2") for k in range(count)]

    def metrics(self) -> dict[str, float]:
        return {}


def make_controller(groups: int, staleness: int, watch: Stopwatch, folder: Path) -> Controller:
    """Create the controller of a run with ``groups`` prompts a step: colocated at staleness 0, else separate cards that
    run ahead."""
    cards = NamedCards(watch)
    queue = NamedQueue(watch, cards)
    scorer, everyone = NamedScorer(queue), tuple(range(CARDS))
    deployment = Deployment(everyone if staleness == 0 else (CARDS,), everyone)
    rollout, algorithm = RolloutConfig(max_response_length=512), AlgorithmConfig(group_size=GROUP_SIZE)
    spec: Any = SimpleNamespace(
        rollout=rollout,
        seed=0,
        world=len({*deployment.train, *deployment.generate}),
        engines=[(rank,) for rank in everyone],
        deployment=deployment,
        detokenizer=None,
        reward_model=None,
        reference=None,
        algorithm=algorithm,
        train=Parallel(len(deployment.train)),
    )
    admission = Admission(
        AdmissionSpec(
            group_size=GROUP_SIZE,
            num_engines=CARDS,
            shared_engines=frozenset(everyone) if staleness == 0 else frozenset(),
            engine_slots=SLOTS,
            max_response_tokens=512,
            max_filtered_groups=10 * groups,
            ahead=staleness > 0,
            filters=False,
            order=rollout.order,
        ),
        StalenessLedger(staleness, groups),
    )
    run_folder = RunFolder(folder, f"groups-{groups}-{staleness}")
    view: Any = SimpleNamespace(
        begin_step=lambda *_: None, update=lambda *_: None, phase=lambda *_: None, note=lambda *_: None
    )
    metrics = StepMetrics(spec.world, run_folder)
    rule = make_algorithm(algorithm, 512)
    share = InferenceShare(everyone, 0.9, SLOTS)
    groups_ = Groups(GROUP_SIZE, admission, scorer.prompts, rule, queue=queue, folder=run_folder)  # type: ignore[arg-type]
    any_: dict[str, Any] = dict(cards=cards, queue=queue, view=view, source=NamedPrompts(watch), folder=run_folder)
    updater = Updater(spec=spec, algorithm=rule, record_reports=metrics.take, cards=cards, queue=queue, view=view)  # type: ignore[arg-type]
    return Controller(
        config=SimpleNamespace(  # type: ignore[arg-type]
            run=SimpleNamespace(steps=1 << 20),
            cluster=SimpleNamespace(npus=spec.world),
            rollout=rollout,
            stalesync=SimpleNamespace(max_staleness=staleness),
        ),
        restarts=SimpleNamespace(**dict.fromkeys(("check", "observe", "rejoin"), lambda: None)),  # type: ignore[arg-type]
        admission=admission,
        scorer=scorer,
        groups=groups_,
        generation=Generation(spec, cards, scorer.prompts, metrics.take),  # type: ignore[arg-type]
        updater=updater,
        rows=StepRows(
            ledger=admission.ledger,
            updater=updater,
            step_metrics=metrics,
            pace=PaceTally(None),
            take_save_metrics=dict,
            **any_,
        ),
        desk=SimpleNamespace(read=lambda *_: "", share=share),  # type: ignore[arg-type]
        step_metrics=metrics,
        **any_,
    )


def measure(groups: int, staleness: int, min_groups: int = 8192) -> dict[str, float]:
    """Return `us_a_group`, CPU microseconds of the controller per group, and `queue_calls` of a step: the mean of the
    steps that train ``min_groups`` groups, at least two, after a first one."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as name:
        controller = make_controller(groups, staleness, watch, Path(name))
        controller.train_step()
        steps = max(2, min_groups // groups)
        with collecting_seldom((staleness + 1) * groups * GROUP_SIZE):
            start_s, calls = watch.read_s(), controller.queue.calls  # type: ignore[attr-defined]
            for _ in range(steps):
                controller.train_step()
            cpu_s, calls = watch.read_s() - start_s, controller.queue.calls - calls  # type: ignore[attr-defined]
        assert controller.admission.ledger.ended["trained"] == groups * (1 + steps), "all groups were trained"
        controller.folder.close()
    return {"us_a_group": cpu_s / steps / groups * 1e6, "queue_calls": calls / steps}
