"""Run a card's engine for a stage: step until it is paused, and put finished samples to the queue.

requests ─► engine ─ finished ─► merged with what was generated before, detokenised ─► queue
              │
              ├─ end of a chunk ─► suspended: a row of `partial_samples`, reported to the first card
              └─ pause ──────────► suspended, too; the stage ends

Its time is recorded step by step: `prefill` if anything was prefilled, `decode`, `wait_data` if this card computed
nothing (no requests, or a step for the sake of other cards), `put` to the queue."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from distqueue import SampleQueue
from fusion.inference import InferEngine, Output, Request
from fusion.inference.counters import TOTALS
from fusion.inference.request import CONTINUED
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.metrics import DraftReport
from fusion.rollout.packing import pack_answers
from fusion.rollout.partial_samples import PartialSamples
from fusion.rollout.types import EvalAnswer, SuspendedSample
from fusion.telemetry import WAIT_DATA, Metrics, Timeline
from fusion.telemetry.memory import MIB

MAX_PENDING = 64
"""Maximum number of finished samples that a card collects before it puts them to the queue in one message."""
MAX_PENDING_S = 0.2
"""Maximum seconds that a finished sample waits for others."""
MAX_GATHER_S = 0.05
"""Maximum seconds that a request at the end of its chunk waits for others before it is reported to the controller."""
IDLE_POLL_S = 0.001
"""An idle engine polls for orders this often."""


class EngineStage:
    """Run one engine. Collective over its cards: `run`, `answer`. Any thread of the first card: `submit`,
    `await_suspended`. ``detokenize``: gives responses their text; None: they get none. ``routing``: the engine's
    outputs have their routing, ``kept``: their kept ids; ``turns``: samples are conversations. ``drafter``: the
    engine's; its figures are reported with the engine's."""

    def __init__(
        self,
        engine: InferEngine,
        queue: SampleQueue,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        routing: bool = False,
        kept: bool = False,
        turns: bool = False,
        drafter: TextDrafter | None = None,
    ):
        self.engine = engine
        self._drafter, self._drafts = drafter, None if drafter is None else DraftReport(drafter)
        self._queue, self._detokenize = queue, detokenize
        self._partials = PartialSamples(
            queue, caches=engine.num_ranks == 1, routing=routing, kept=kept, turns=turns, detokenize=detokenize
        )
        self.complete = self._partials.complete
        self._reported: dict[str, float] = {}
        """`InferEngine.status` when its totals were reported last"""
        self._sender = ThreadPoolExecutor(1, "samples")
        """Puts finished samples to the queue while the engine steps"""
        self._suspended: list[SuspendedSample] = []
        """This card's samples that are reported neither to the first card nor to the controller yet"""
        self._running = False
        """Whether `run` steps the engine"""
        self._changed = threading.Condition()
        """Lock for all accesses to both; notified when a sample is suspended and when `run` has ended"""

    def run(
        self, requests: Sequence[Request], *, stay: bool, metrics: Metrics, timeline: Timeline
    ) -> list[SuspendedSample]:
        """Step until the engine is paused or, unless ``stay``, until it is idle. The requests are the first card's.
        Return the unfinished samples."""
        engine, self._reported, self._running = self.engine, self.engine.status(), True
        try:
            engine.resume()
            if requests:
                self.submit(requests)
            with timeline.strip() as mark:
                pending = self._step_until_paused(stay, mark)
                suspended = engine.suspend()
                if self._drafter is not None:
                    self._drafter.flush()
                self._put(pending, suspended)
                mark("put")
            self._receive()
            self.count(metrics)
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()
        return self._take_suspended()

    def count(self, metrics: Metrics) -> None:
        """Add the engine's figures since the last call; the totals of all cards on its first card."""
        metrics.add("rollout/parked_kv_mib_max", self.engine.parked_kv_bytes / MIB)
        if self._drafts is not None:
            self._drafts.add_to(metrics)
        if not self.engine.is_leader:
            return
        before, self._reported = self._reported, self.engine.status()
        added = {name: self._reported[name] - before[name] for name in TOTALS if name in before}
        decoded, accepted = added.pop("decoded_sequences"), added["accepted_tokens"]
        for name, increase in added.items():
            metrics.add(f"rollout/{name}", increase, rule="sum")
        metrics.add("rollout/wasted_tokens", added["drafted_tokens"] - accepted, rule="sum")
        if decoded:
            metrics.add("rollout/tokens_per_forward_mean", 1 + accepted / decoded, decoded)
        if generated := added["generated_tokens"]:
            metrics.add("rollout/draft_share_mean", accepted / generated, generated)
        metrics.add("rollout/kv_tokens_min", self._reported["kv_tokens"])

    def answer(self, requests: Sequence[Request], rows: str, timeline: Timeline) -> list[EvalAnswer]:
        """Step until all requests have finished, or their turn, while nothing else is in the engine; return their
        answers. ``rows``: the tokens of answer `<id>` are put to the queue as row `<rows><id>`, in no task's columns;
        "": their tokens are not kept."""
        if requests:
            self.engine.submit(requests)
        with timeline.strip() as mark:
            outputs = self._step(mark)
            while not self.engine.idle:
                outputs += self._step(mark)
            row_by_id = {output.request_id: f"{rows}{output.request_id}" if rows else "" for output in outputs}
            if rows and outputs:
                self._queue.put(pack_answers(outputs, list(row_by_id.values())))
                mark("put")
        return [
            EvalAnswer(
                id=output.request_id,
                text=self._detokenize([*output.before, *output.tokens]) if self._detokenize else "",
                response_tokens=len(output.before) + len(output.tokens),
                finish_reason=output.finish_reason,
                row=row_by_id[output.request_id],
                tokens=tuple(output.tokens) if output.finish_reason == "turn" else (),
                turn=self._detokenize(output.tokens) if output.finish_reason == "turn" and self._detokenize else "",
            )
            for output in outputs
        ]

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests to the engine, suspended ones with the tokens they have. On the first card."""
        self.engine.submit(self._partials.restore(requests))

    def await_suspended(self, timeout_s: float) -> list[SuspendedSample]:
        """Return the samples of all cards suspended at the end of a chunk since the last call; wait at most
        ``timeout_s`` for the first one, and `MAX_GATHER_S` for others. Return at once when `run` has ended. On the
        first card; the other cards report theirs to it when they step, and what is left at the end of `run` there."""
        with self._changed:
            if self._changed.wait_for(lambda: self._suspended or not self._running, timeout_s) and self._running:
                self._changed.wait_for(lambda: not self._running, MAX_GATHER_S)
        return self._take_suspended()

    def _take_suspended(self) -> list[SuspendedSample]:
        with self._changed:
            suspended, self._suspended = self._suspended, []
        return suspended

    def _add_suspended(self, suspended: Sequence[SuspendedSample]) -> None:
        if suspended:
            with self._changed:
                self._suspended += suspended
                self._changed.notify_all()

    def _receive(self) -> None:
        """Take over what the other cards have reported to the first one."""
        if self.engine.is_leader and self.engine.num_ranks > 1:
            self._add_suspended([SuspendedSample.from_dict(item) for item in self.engine.take_reports()])

    def _step_until_paused(self, stay: bool, mark: Callable[[str], None]) -> list[Output]:
        """Step until the engine is paused or, unless ``stay``, idle. Return what has finished and was not put yet."""
        engine, pending, put_s = self.engine, list[Output](), time.monotonic()
        sending: Future[None] | None = None
        while not engine.paused:
            pending += self._step(mark)
            if engine.idle and not stay:  # on all ranks at the same step, as is `paused`
                break
            if sending is not None and sending.done():
                sending = sending.result()  # raises what it raised
            due = engine.idle or len(pending) >= MAX_PENDING or time.monotonic() - put_s > MAX_PENDING_S
            if pending and due and sending is None:
                sending, pending, put_s = self._sender.submit(self._put, pending), [], time.monotonic()
            elif engine.idle:
                time.sleep(IDLE_POLL_S)
                mark(WAIT_DATA)
        if sending is not None:
            sending.result()
        return pending

    def _step(self, mark: Callable[[str], None]) -> list[Output]:
        if self._suspended and not self.engine.is_leader:
            self.engine.report(map(vars, self._take_suspended()))
        outputs = self.engine.step()
        self._receive()
        mark(self.engine.last_step_kind or WAIT_DATA)
        return outputs

    def _put(self, outputs: list[Output], suspended: Sequence[Output] = ()) -> None:
        finished = [output for output in outputs if output.finish_reason not in CONTINUED]
        continued = [output for output in outputs if output.finish_reason in CONTINUED]
        self._add_suspended(self._partials.put(finished, [*continued, *suspended]))
