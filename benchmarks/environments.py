"""Measure what conversations cost while their environments work.

pool: conversations that are away in one pool process, which all wait in their environments, and then take turns of 10
s: each reply is followed by the next step at once. Figures are of 30 s each. Memory is what the process and its pool
hold above the idle ones (idle_mb), share of a core that of both together. Floor: as many sleeping tasks of asyncio in a
process of their own.

zero_latency, latency, kv: conversations of four turns on an engine that decodes 16 at a time, of a paced card
(OLMoE-1B-7B on a 910C die, at half its speed), whose environments answer at once, or after ten decode steps. ratio:
tokens/s over those of responses of one turn with as many sampled tokens, in turns, medians over the rounds. occupancy:
share of the slots that decode. restored: share of the context of later turns whose KV is not computed again.
"""

import heapq
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from statistics import mean
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians_of, progress

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 3, smoke=1, help="of the paced parts")],
    "pool.waiting_mb <= 200, pool.turning_mb <= 200, pool.waiting_core <= 0.05, zero_latency.ratio >= 0.95, "
    "latency.occupancy >= 0.9, kv.restored >= 0.95",
    parts={"pool": "benchmarks.environments_pool:away"} | {part: part for part in ("zero_latency", "latency", "kv")},
    sizes={"conversations": (1000, 20), "latency_s": (10.0, 0.2), "seconds": (30.0, 0.5), "speed": (0.5, 4.0)}
    | {"slots": (16, 2), "turns": (4, 2), "turn_tokens": (32, 4), "observation_tokens": (16, 4)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.models import model_of
from distqueue import LocalQueue, PackedBatch
from fusion.colocate.paced import PacedEngine
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.pace import EngineCost, Pace
from fusion.costmodel.presets import load_shape
from fusion.inference import Request, SamplingParams
from fusion.model import Parallel
from fusion.npu import open_device
from fusion.npu.pacer import Pacer
from fusion.offload import HostPool
from fusion.resources import SHAPES
from fusion.rollout import EndedConversation, EngineRoom, RequestBuffer, SuspendedSample
from fusion.rollout.engine_stage import EngineStage
from fusion.rollout.partial_samples import OBSERVATION
from fusion.telemetry import Metrics, Timeline
from tests.helpers import tiny_config
from tests.rollouts import rollout_config

IN_PROGRESS, WAVES = 4, 3
"""Conversations in progress relative to the slots, and conversations of a run relative to those in progress"""
STEPS_AWAY = 10
"""Decode steps for which an environment with latency answers"""
PROMPT_TOKENS, POLL_S = 32, 0.001
MAX_REQUESTS = 1.5
"""Requests that an engine has, relative to those that it decodes at a time: as in `stalesync.policy.admission_spec`"""


class Side:
    """A run of conversations of ``num_turns``, in which as many tokens are sampled whatever their number."""

    def __init__(self, args: Arguments, num_turns: int, latency_s: float = 0.0) -> None:
        self.queue, self.buffer = LocalQueue(["train"]), RequestBuffer()
        self.slots, self.in_progress, self.num_turns = args.slots, IN_PROGRESS * args.slots, num_turns
        self.count, self.latency_s = WAVES * self.in_progress, latency_s
        self.turn_tokens, self.observation = args.turns * args.turn_tokens // num_turns, args.observation_tokens
        # with room for one more token: its length does not end a response
        self.max_tokens = num_turns * self.turn_tokens + (num_turns - 1) * self.observation + 1
        pace = Pace(load_shape("olmoe_7b", SHAPES).shape, hardware_named("ascend_910c"), 1, args.speed)
        self.pacer, device = Pacer(), open_device("emulated")
        model = model_of(tiny_config(experts=False, num_hidden_layers=1), device).requires_grad_(False)
        longest = PROMPT_TOKENS + self.max_tokens
        limits = dict(max_length=longest, max_seqs=self.slots, max_kv_tokens=self.in_progress * (longest + 16))
        config = rollout_config(max_batch_tokens=512, prefix_cache=False, suspended="keep", **limits)
        cost = EngineCost(pace, Parallel(), full_batch=self.slots)
        memory = HostPool(device)
        self.engine = PacedEngine(model, model.mesh, device, config, memory=memory, pacer=self.pacer, cost=cost)
        self.engine.allocate_kv()
        self.stage = EngineStage(self.engine, self.queue, turns=self.num_turns > 1)
        self.begun, self.turns, self.away = 0, Counter[str](), list[tuple[float, str]]()
        """Conversations; turns that have ended, by conversation; (when its environment answers, it), a heap"""

    def run(self) -> Figures:
        with ThreadPoolExecutor(1) as threads:
            for _ in range(self.in_progress):
                self._begin()
            first = self._dispatch()
            running = threads.submit(self.stage.run, first, stay=True, metrics=Metrics(), timeline=Timeline("card"))
            try:
                return self._measure(running)
            finally:
                self.engine.pause()

    def _measure(self, running: Future[list[SuspendedSample]]) -> Figures:
        """Return tokens/s; ``occupancy``: mean share of the slots that decode; ``restored``: share of the context of
        later turns whose KV was not computed again; ``step_s``: modelled seconds of decoding for as many tokens as
        there are slots; ``overrun``: share of the seconds by which steps ended later than modelled."""
        engine, shares, start = self.engine, list[float](), None
        while self.begun < self.count:
            if running.done():
                raise RuntimeError("the engine has stopped") from running.exception()
            for one in self.stage.await_suspended(POLL_S) if self.num_turns > 1 else ():
                self.buffer.suspend(0, one)
                self.turns[one.id] += 1
                heapq.heappush(self.away, (time.perf_counter() + self.latency_s, one.id))
            self._answer()
            self._take_finished()
            if requests := self._dispatch():
                self.stage.submit(requests)
            if forgotten := self.buffer.take_left_kv():
                engine.forget(forgotten[0])
            if start is None and self.begun > self.in_progress:
                start = self._totals()
            if start is not None:
                shares.append(engine.status()["running"] / self.slots)
            time.sleep(POLL_S)
        assert start is not None, "no conversation has ended"
        gained = {name: value - start[name] for name, value in self._totals().items()}
        context = gained["kv_restored_tokens"] + gained["recomputed_tokens"]
        return {
            "tokens_per_s": gained["generated_tokens"] / gained["seconds"],
            "occupancy": mean(shares),
            "restored": gained["kv_restored_tokens"] / context if context else 0.0,
            "step_s": gained["decode_s"] / (gained["decoded_sequences"] / self.slots),
            "overrun": gained["overrun_s"] / gained["seconds"],
        }

    def _totals(self) -> dict[str, float]:
        pacer = {"decode_s": self.pacer.modelled_s.get("decode", 0.0), "overrun_s": sum(self.pacer.overrun_s.values())}
        return {**self.engine.status(), **pacer, "seconds": time.perf_counter()}

    def _begin(self) -> None:
        self.buffer.add(f"g{self.begun}", [f"g{self.begun}/0"], PROMPT_TOKENS, self.max_tokens)
        self.begun += 1

    def _dispatch(self) -> list[Request]:
        room = EngineRoom(round(MAX_REQUESTS * self.slots))
        params = SamplingParams(max_tokens=self.max_tokens, stop_token_ids=())
        several, requests = self.num_turns > 1, []
        for entry in self.buffer.dispatch([0], room)[0] if self.buffer.num("waiting") else ():
            before: Any = dict(earlier=entry.earlier, observation=entry.observation)
            before |= dict(kv_rank=entry.kv[1] if entry.kv else None, exact_tokens=self.turn_tokens)
            requests.append(Request(entry.id, _prompt(entry.id), params, group=entry.group, turns=several, **before))
        return requests

    def _answer(self) -> None:
        """Let the environments answer that are due; conversations that have all their turns end."""
        answered, ended = [], []
        while self.away and self.away[0][0] <= time.perf_counter():
            _, id = heapq.heappop(self.away)
            (ended if self.turns[id] == self.num_turns else answered).append(self.buffer.entries[id])
        if answered:
            said = [torch.arange(self.observation) for _ in answered]
            self.queue.put(PackedBatch.from_samples([entry.earlier for entry in answered], {OBSERVATION: said}))
        for entry in answered:
            self.buffer.observe_returned(entry.id, self.observation)
        if ended:
            self.stage.complete([EndedConversation(entry.earlier, entry.group, _prompt(entry.id)) for entry in ended])

    def _take_finished(self) -> None:
        finished = [id for id in self.queue.holding("response") if id in self.buffer.entries]
        if finished:
            self.buffer.finish({id: self.max_tokens - 1 for id in finished})
            self.queue.drop(finished, "measured")
        for id in finished:
            self.buffer.remove(id[:-2])
            if self.begun < self.count:
                self._begin()


def _prompt(id: str) -> tuple[int, ...]:
    number = int(id[1:-2])
    return tuple(2 + (number + position) % 29 for position in range(PROMPT_TOKENS))


def run(args: Arguments, num_turns: int, latency_s: float = 0.0) -> Figures:
    return progress(f"{num_turns} turns, latency {latency_s:.3f} s", Side(args, num_turns, latency_s).run())


@cache
def zero_latency(args: Arguments) -> Figures:
    """Compare conversations whose environment answers at once with responses of one turn."""
    turns = {"single": 1, "several": args.turns}
    sides = {name: lambda _, count=count: run(args, count) for name, count in turns.items()}
    figures = {name: medians_of(rows) for name, rows in in_turns(sides, args.rounds, warm_ups=0).items()}
    return {"ratio": figures["several"]["tokens_per_s"] / figures["single"]["tokens_per_s"], **figures}


@cache
def latency(args: Arguments) -> Figures:
    """Run conversations of several turns whose environments answer after `STEPS_AWAY` decode steps."""
    latency_s = STEPS_AWAY * zero_latency(args)["several"]["step_s"]
    return {"latency_s": latency_s} | medians_of([run(args, args.turns, latency_s) for _ in range(args.rounds)])


def kv(args: Arguments) -> Figures:
    """Return the share of the context of later turns whose KV is restored, with the latency and at once."""
    return {"restored": latency(args)["restored"], "restored_at_once": zero_latency(args)["several"]["restored"]}
