"""A card's engine at work: it steps until it is told to pause; what has ended goes to the queue as it comes.

requests ─► engine ─ ended ─► merged with what was generated before ─► queue
              │
              ├─ a chunk's end ─► suspended: a row of `partial_samples`, until `take_suspended` asks for them
              └─ pause ─────────► suspended likewise; the stage ends

Its time is told step by step: `prefill` if anything was prefilled, `decode`, `wait_data` if this card computed nothing
(no requests, or a step for the sake of other cards), `put` to the queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from fusion.inference import EmbeddedEngine, Output, Request
from fusion.rollout.partial_samples import PartialSamples, SampleStore
from fusion.rollout.types import SuspendedSample
from fusion.telemetry import WAIT_DATA, Metrics, Timeline
from fusion.telemetry.memory import MIB

TOTALS = (
    "generated_tokens",
    "dummy_steps",
    "preemptions",
    "prefix_hit_tokens",
    "kv_restored_tokens",
    "recomputed_tokens",
    "interrupted",
)
"""Figures of `EmbeddedEngine.status` of which a stage tells what was added."""

PUT_EVERY = 64
"""Finished samples a card gathers before it puts them to the queue: one message for many short ones …"""

PUT_EVERY_S = 0.2
"""… but none waits longer than this for others"""

IDLE_S = 0.001
"""An engine that has nothing to do asks for orders this often"""


class EngineStage:
    """Collective over the engine's cards: `run`, `answer`. Any thread: `submit`, `take_suspended`."""

    def __init__(self, engine: EmbeddedEngine, queue: SampleStore):
        self.engine = engine
        self._partials = PartialSamples(queue, remembers=engine.mesh.parallel.world == 1)
        self._counted: dict[str, float] = {}
        self._sender = ThreadPoolExecutor(1, "samples")
        """Puts what has ended to the queue while the engine goes on"""
        self._unfinished: list[SuspendedSample] = []
        """That the controller has not heard of"""
        self._handing_over = threading.Lock()

    def run(
        self, requests: Sequence[Request], stay: bool, metrics: Metrics, timeline: Timeline
    ) -> list[SuspendedSample]:
        """Steps until it is told to ``pause`` or, unless it is to ``stay``, has nothing left to do. The requests are
        the first card's. Returns what was left unfinished."""
        engine, self._counted = self.engine, self.engine.status()
        engine.resume()
        if requests:
            self.submit(requests)
        with timeline.strip() as mark:
            pending = self._step_on(stay, mark)
            suspended = engine.suspend()
            self._put(pending, suspended)
            mark("put")
        self.count(metrics)
        return self.take_suspended()

    def count(self, metrics: Metrics) -> None:
        """Adds the engine's figures since they were counted last, on its first card those of all."""
        metrics.add("rollout/parked_kv_mib_max", self.engine.parked.host_bytes / MIB)
        if self.engine.mesh.rank != 0:
            return
        before, self._counted = self._counted, self.engine.status()
        for name in TOTALS:
            metrics.add(f"rollout/{name}", self._counted[name] - before[name], rule="sum")
        metrics.add("rollout/kv_tokens_min", self._counted["kv_tokens"])

    def answer(self, requests: Sequence[Request], timeline: Timeline) -> list[Output]:
        """Steps until all requests have ended, while nothing else is in the engine. Nothing enters the queue."""
        if requests:
            self.engine.submit(requests)
        with timeline.strip() as mark:
            outputs = self._step(mark)
            while not self.engine.idle:
                outputs += self._step(mark)
        return [replace(output, routing=None) for output in outputs]  # nobody trains on them

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands requests to the engine, those that were suspended with the tokens they have. On the first card."""
        self.engine.submit(self._partials.restore(requests))

    def take_suspended(self) -> list[SuspendedSample]:
        """Returns what was suspended since the last call, at its chunk's end or by a pause. On any card."""
        with self._handing_over:
            unfinished, self._unfinished = self._unfinished, []
        return unfinished

    def _step_on(self, stay: bool, mark: Callable[[str], None]) -> list[Output]:
        """Until the engine is paused or, unless it is to ``stay``, idle. Returns what has ended and was not put yet."""
        engine, pending, said_s = self.engine, list[Output](), time.monotonic()
        sent: Future[None] | None = None
        while not engine.paused:
            pending += self._step(mark)
            if engine.idle and not stay:  # on all ranks at the same step, as is `paused`
                break
            if sent is not None and sent.done():
                sent = sent.result()  # raises what it raised
            due = engine.idle or len(pending) >= PUT_EVERY or time.monotonic() - said_s > PUT_EVERY_S
            if pending and due and sent is None:
                sent, pending, said_s = self._sender.submit(self._put, pending), [], time.monotonic()
            elif engine.idle:
                time.sleep(IDLE_S)
                mark(WAIT_DATA)
        if sent is not None:
            sent.result()
        return pending

    def _step(self, mark: Callable[[str], None]) -> list[Output]:
        outputs = self.engine.step()
        mark(self.engine.computed or WAIT_DATA)
        return outputs

    def _put(self, outputs: list[Output], suspended: Sequence[Output] = ()) -> None:
        ended = [output for output in outputs if output.finish_reason != "chunk"]
        chunks = [output for output in outputs if output.finish_reason == "chunk"]
        unfinished = self._partials.put(ended, [*chunks, *suspended])
        with self._handing_over:
            self._unfinished += unfinished
