"""Run the part `engines` of `benchmarks/drafts.py`: groups that are divided over several engines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.drafts_sides import DEPTH, GROUP, SHARES, Figures, Said, Tokens, _accepted, texts_of_two_epochs
from fusion.inference import Request, SamplingParams, sequence
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import TextExchange, answer
from fusion.rollout.drafts.native import NativeIndexes
from fusion.rollout.drafts.text_store import TextStore
from fusion.rollout.drafts.texts import TextSpec

STEP_S = 0.02
"""Modelled seconds of a decode step: text of others is about ten steps old"""

TOGETHER = 4
"""Responses of a group that all engines together decode at a time"""


class AllTokens(DraftBudget):
    """A budget that verifies whatever is drafted, as `text` does."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptance.by_share = lambda: SHARES  # type: ignore[method-assign]

    def skips(self, num_sequences: int) -> bool:
        return False

    def choose(
        self,
        owners: np.ndarray,
        probabilities: np.ndarray,
        num_sequences: int,
        *,
        max_tokens: int = 1 << 30,
        urgent: np.ndarray | None = None,
    ) -> np.ndarray:
        return np.ones(len(owners), bool)


@dataclass
class Engine:
    """``waiting``: by group, (request, what it will say); ``running``: likewise, with its sequence."""

    drafter: TextDrafter
    waiting: dict[int, list[tuple[str, Tokens]]] = field(default_factory=dict)
    running: dict[int, list[tuple[sequence.Sequence, Tokens]]] = field(default_factory=dict)
    forwards: int = 0
    tokens: int = 0

    @property
    def idle(self) -> bool:
        return not (any(self.waiting.values()) or any(self.running.values()))

    def start(self, epoch: int, slots: int) -> None:
        """Fill the places of each group with requests that wait."""
        params = SamplingParams(max_tokens=1 << 20, stop_token_ids=())
        for group, waiting in self.waiting.items():
            running = self.running.setdefault(group, [])
            while waiting and len(running) < slots:
                name, said = waiting.pop(0)
                request = Request(name, (group + 1,), params, f"{epoch}-{group}")
                running.append((sequence.Sequence.of(request, params, ()), said))

    def step(self) -> None:
        """Decode one token of each sequence, and verify its draft."""
        live = [one for running in self.running.values() for one in running]
        depths = [min(DEPTH, len(said) - len(seq.tokens) + seq.first_token - 1) for seq, said in live]
        drafts = self.drafter.draft([seq for seq, _ in live], depths, 1 << 20)
        for (seq, said), draft in zip(live, drafts, strict=True):
            done, kept = len(seq.tokens) - seq.first_token, 1
            if draft is not None:
                kept += _accepted(np.array(draft.tokens), np.array(draft.parents), said[done:])
            seq.tokens += said[done : done + kept]
            self.tokens += kept
            self.forwards += 1
        for group, running in self.running.items():
            for seq, said in running:
                if len(seq.tokens) - seq.first_token == len(said):
                    self.drafter.end(seq)
            self.running[group] = [one for one in running if len(one[0].tokens) - one[0].first_token < len(one[1])]


class Cluster:
    """Engines in modelled time, and the store. ``update_s``, ``store_s``: CPU seconds of the engines' steps for the
    exchange, and of the store; ``steps``: of all engines."""

    def __init__(self, count: int, shares: bool, siblings: bool, history: bool) -> None:
        self.now_s = self.update_s = self.store_s = 0.0
        self.steps = 0
        store = TextStore(1 << 30)

        def ask(message: bytes) -> bytes:
            start_s = time.thread_time()
            reply = answer(store, message)
            self.store_s += time.thread_time() - start_s
            return reply

        self.engines = []
        for number in range(count):
            drafter = TextDrafter(
                NativeIndexes(), spec=TextSpec(siblings, history), max_depth=DEPTH, budget=AllTokens()
            )
            if shares:
                drafter.exchange = TextExchange(ask, number, count, clock=lambda: self.now_s)
            self.engines.append(Engine(drafter))

    def run(self, epoch: int, slots: int) -> None:
        """Decode until all requests have ended."""
        while not all(engine.idle for engine in self.engines):
            self.now_s += STEP_S
            for engine in self.engines:
                engine.start(epoch, slots)
                self._exchange(engine.drafter)
                engine.step()
        for _ in range(30):  # as engines that poll for requests
            self.now_s += STEP_S
            for engine in self.engines:
                self._exchange(engine.drafter)

    def _exchange(self, drafter: TextDrafter) -> None:
        if drafter.exchange is None:
            return
        self.steps += 1
        start_s = time.thread_time()
        if update := drafter.drafts_update():
            drafter.read(update)
        self.update_s += time.thread_time() - start_s
        if drafter.exchange._thread is not None:
            drafter.exchange._thread.join()


def engines(args: argparse.Namespace) -> Figures:
    """Replay the responses of the second epoch on 1, 2 and 4 engines, with the exchange of text and without."""
    groups = texts_of_two_epochs(args)
    figures: Figures = {}
    for name in ("siblings", "history", "both"):
        for count in (1, 2, 4):
            for shares in (False, True) if count > 1 else (False,):
                key = f"{name}.{count}" + (".exchange" if shares else "")
                figures[key] = one = _measure(groups, count, shares, name)
                line = f"engines, {key:20} {one['tokens_per_forward']:5.2f} tokens a forward"
                if shares:
                    line += f", sent {one['bytes_per_token']:.2f} bytes a token, {one['received_bytes_per_token']:.2f}"
                    line += f" received, {one['step_us']:.0f} us a step, {one['store_us']:.1f} us a token in the store"
                print(line)
    return figures


def _measure(groups: Sequence[Said], count: int, shares: bool, name: str) -> dict[str, Any]:
    cluster = Cluster(count, shares, siblings=name != "history", history=name != "siblings")
    if name != "siblings":  # the first epoch: each group on one engine
        for number, said in enumerate(groups):
            waiting = [(f"0-{number}/{i}", text) for i, text in enumerate(said.history)]
            cluster.engines[number % count].waiting[number] = waiting
        cluster.run(0, GROUP)
        for engine in cluster.engines:
            engine.forwards = engine.tokens = 0
    for number, said in enumerate(groups):
        for i, text in enumerate(said.texts):
            # history: the whole group on the next engine; else divided
            engine = cluster.engines[(number + 1 if name == "history" else i) % count]
            engine.waiting.setdefault(number, []).append((f"1-{number}/{i}", text))
    cluster.run(1, GROUP if name == "history" else TOGETHER // count)
    figures: dict[str, Any] = {
        "tokens_per_forward": sum(engine.tokens for engine in cluster.engines)
        / sum(engine.forwards for engine in cluster.engines)
    }
    if shares:
        totals = [engine.drafter.exchange.totals for engine in cluster.engines if engine.drafter.exchange is not None]
        sent, received = sum(one.sent_tokens for one in totals), sum(one.received_tokens for one in totals)
        figures["bytes_per_token"] = sum(one.sent_bytes for one in totals) / sent
        figures["received_bytes_per_token"] = sum(one.received_bytes for one in totals) / max(1, received)
        figures["step_us"] = 1e6 * cluster.update_s / cluster.steps
        figures["store_us"] = 1e6 * cluster.store_s / sent
    return figures
