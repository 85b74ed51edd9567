"""Engines that decode known texts with drafts, and exchange text, in modelled time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusion.inference import Request, SamplingParams, sequence
from fusion.rollout.drafts.budget import SHARES, DraftBudget
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import TextExchange, answer
from fusion.rollout.drafts.suffix_index import SuffixIndexes
from fusion.rollout.drafts.text_store import TextStore
from fusion.rollout.drafts.texts import TextSpec

Tokens = list[int]

DEPTH = 8
"""Tokens of a draft at most"""
STEP_S = 0.02
"""Modelled seconds of a decode step: text of others is about ten steps old"""


def accepted(tokens: np.ndarray, parents: np.ndarray, said: Tokens) -> int:
    """Return how many tokens of a drafted tree are what is said."""
    node, depth = -1, 0
    for child in range(len(tokens)):
        if parents[child] == node and depth < len(said) and tokens[child] == said[depth]:
            node, depth = child, depth + 1
    return depth


class AllTokens(DraftBudget):
    """A budget that verifies whatever is drafted, as `text` does."""

    def by_share(self) -> np.ndarray:
        return SHARES

    def skips(self) -> bool:
        return False

    def min_probability(self, num_sequences: int) -> float:
        return 0.0

    def choose(self, owners: np.ndarray, probabilities: np.ndarray, num_sequences: int, **_: Any) -> np.ndarray:
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
        done = [len(seq.tokens) - seq.first_token for seq, _ in live]
        depths = [min(DEPTH, len(said) - at - 1) for (_, said), at in zip(live, done, strict=True)]
        drafts = self.drafter.draft([seq for seq, _ in live], depths, 1 << 20)
        for (seq, said), at, draft in zip(live, done, drafts, strict=True):
            kept = 1
            if draft is not None:
                kept += accepted(np.array(draft.tokens), np.array(draft.parents), said[at:])
            seq.tokens += said[at : at + kept]
            self.tokens += kept
            self.forwards += 1
        for group, running in self.running.items():
            ended = [len(seq.tokens) - seq.first_token == len(said) for seq, said in running]
            for (seq, _), over in zip(running, ended, strict=True):
                if over:
                    self.drafter.end(seq)
            self.running[group] = [one for one, over in zip(running, ended, strict=True) if not over]


class Cluster:
    """Engines in modelled time, and the store. ``exchange_s``, ``store_s``: CPU seconds of the engines' steps for the
    exchange, and of the store; ``steps``: of all engines."""

    def __init__(self, count: int, shares: bool, siblings: bool, history: bool) -> None:
        self.now_s = self.exchange_s = self.store_s = 0.0
        self.steps, store = 0, TextStore(1 << 30)

        def ask(message: bytes) -> bytes:
            start_s = time.thread_time()
            reply = answer(store, message)
            self.store_s += time.thread_time() - start_s
            return reply

        self.engines = []
        for number in range(count):
            drafter = TextDrafter(
                SuffixIndexes(), spec=TextSpec(siblings, history), max_depth=DEPTH, budget=AllTokens()
            )
            if shares:
                drafter.exchange = TextExchange(ask, number, count, clock=lambda: self.now_s)
            self.engines.append(Engine(drafter))

    def run(self, epoch: int, slots: int) -> None:
        """Decode until all requests have ended, then exchange text for a while, as engines that poll for requests."""
        left = 30
        while left:
            idle = all(engine.idle for engine in self.engines)
            left -= idle
            self.now_s += STEP_S
            for engine in self.engines:
                engine.start(epoch, slots)
                self._exchange(engine.drafter)
                if not idle:
                    engine.step()

    def _exchange(self, drafter: TextDrafter) -> None:
        if drafter.exchange is None:
            return
        self.steps += 1
        start_s = time.thread_time()
        if update := drafter.drafts_update():
            drafter.read(update)
        self.exchange_s += time.thread_time() - start_s
        if drafter.exchange._thread is not None:
            drafter.exchange._thread.join()
