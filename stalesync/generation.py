"""The engines as the controller drives them: which requests run where, from the first token to the last.

    admit ─► buffer ─ resume ─► engines: `generate` in the background ─► queue
                ▲                  │
                ├──── suspend ─────┤   some engines, or all; what they have not finished goes on elsewhere or later
                └──── gather ──────┘   what has ended with its chunk, while they run

While the cards of an engine train, its share of the requests waits, or is handed to engines that go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.inference import Request
from fusion.rollout import Entry, EvalAnswer, RequestBuffer, SuspendedSample, assign_groups
from stalesync.cards import WARN_EVERY_S, Cards, RunningStage, StageCall, stage_call
from stalesync.failures import CardFailed
from stalesync.prompts import Prompt
from stalesync.prompts.lengths import ForcedLengths

log = logging.getLogger(__name__)

AHEAD = 1.25, 1.5
"""Requests that an engine has, by those it decodes at a time: below the first it gets more, up to the second. What it
has not may go where there is room, or is not begun yet and so no older than it must be. At staleness 0 engines have
everything from the start: which request is decoded beside which then does not depend on the clock."""


CHUNK_LOOK_S = 0.25
"""Engines are asked this often, at most, for requests whose chunk has ended."""


class Generation:
    """``take``: is given the reports of the cards. Engines are numbered as in ``spec.engines``."""

    def __init__(self, spec: WorkerSpec, cards: Cards, group_size: int, take: Callable[[Sequence[StageReport]], None]):
        self._spec, self._cards, self._group_size, self._take = spec, cards, group_size, take
        self._sampling = spec.rollout.sampling()
        self._lengths = None
        if spec.rollout.forced_median is not None:
            self._lengths = ForcedLengths(spec.seed, spec.rollout.forced_median, self._sampling.max_tokens)
        slots = spec.rollout.max_seqs * spec.infer_of_one_engine.dp
        self._most = round(AHEAD[1] * slots) if spec.ahead else None
        self._low = round(AHEAD[0] * slots)
        self.buffer = RequestBuffer()
        self.prompts: dict[str, Prompt] = {}
        """Of the groups in the buffer"""
        self._running: dict[int, RunningStage[StageReport]] = {}
        """By engine"""
        self._gathered_s = 0.0
        """When engines were asked for chunks last"""
        self._said_s = 0.0
        """For how long no sample had come when that was last spoken of"""

    def admit(self, prompts: Iterable[Prompt]) -> None:
        """A group of requests for each prompt; they start at the next `resume` or `hand_over`."""
        for prompt in prompts:
            ids = [f"{prompt.id}/{member}" for member in range(self._group_size)]
            self.buffer.add(prompt.id, ids, len(prompt.ids), self._sampling.max_tokens)
            self.prompts[prompt.id] = prompt

    def resume(self, engines: Sequence[int]) -> None:
        """Sets these engines to work on what waits; those that run get their share of it too."""
        for engine, entries in self.buffer.dispatch(engines, self._most).items():
            ranks, requests = self._spec.engines[engine], [self._request(entry) for entry in entries]
            if engine not in self._running:
                calls = {rank: stage_call(Worker.generate, requests if rank == ranks[0] else []) for rank in ranks}
                self._running[engine] = self._cards.begin_each(calls)
            elif requests:
                self._cards.on(ranks[:1]).ask(Worker.submit, requests)
        for engine, ids in self.buffer.take_left_kv().items():
            if self._spec.rollout.keeps_kv:
                self._cards.on(self._spec.engines[engine][:1]).ask(Worker.forget, ids)

    def hand_over(self) -> None:
        """Gives what waits to the engines that run."""
        if self._running:
            self.resume(sorted(self._running))

    @property
    def hungry(self) -> bool:
        """Whether an engine that runs soon has too little to do, and could get more."""
        return self._most is not None and any(
            self.buffer.num_running_on(engine) <= self._low for engine in self._running
        )

    def groups_wanted(self, engines: Iterable[int] | None = None) -> int | None:
        """Groups that these engines (None: those that run) could begin with now; None: any number."""
        if self._most is None:
            return None
        engines = self._running if engines is None else engines
        held = self.buffer.num("waiting") + sum(self.buffer.num_running_on(engine) for engine in engines)
        return max(0, -(-(self._most * len(list(engines)) - held) // self._group_size))

    def go_on_beside(self, engines: Sequence[int]) -> list[int]:
        """The cards of engines that run, where these and no others of the cards that only generate are to run next:
        they can take new weights while they do."""
        sharing = self.of_cards(self._spec.deployment.train)
        alone = [number for number in range(len(self._spec.engines)) if number not in sharing]
        if not self._spec.ahead or sorted(self._running) != alone or not {*alone} <= {*engines}:
            return []
        return [rank for number in alone for rank in self._spec.engines[number]]

    def suspend(self, engines: Iterable[int] | None = None) -> int:
        """Stops these engines (None: all), as far as they run, between two of their steps. Returns how many samples
        with tokens were left unfinished."""
        chosen = [engine for engine in (self._running if engines is None else engines) if engine in self._running]
        for engine in chosen:
            self._cards.on(self._spec.engines[engine][:1]).ask(Worker.pause)
        unfinished = 0
        for engine in chosen:
            reports = self._cards.wait(self._running.pop(engine))
            self._take(reports)
            unfinished += self._take_back(engine, [one for report in reports for one in report.suspended])
        return unfinished

    def gather(self) -> int:
        """Takes back what has ended with its chunk since the last look, for whoever has room. Returns how many."""
        if self._spec.rollout.chunk_tokens is None or time.monotonic() - self._gathered_s < CHUNK_LOOK_S:
            return 0
        self._gathered_s = time.monotonic()
        engine_of = {rank: engine for engine in self._running for rank in self._spec.engines[engine]}
        told = self._cards.on(list(engine_of)).ask(Worker.take_ended_chunks)
        return sum(self._take_back(engine, mine) for engine, mine in zip(engine_of.values(), told, strict=True))

    def _take_back(self, engine: int, suspended: Iterable[SuspendedSample]) -> int:
        """Returns how many of them have tokens."""
        begun = 0
        for one in suspended:
            self.buffer.suspend(
                engine,
                one.id,
                generated=one.generated,
                earlier=one.earlier,
                versions=one.versions,
                kv_rank=one.kv_rank,
            )
            begun += one.generated > 0
        return begun

    def told(self, until_ns: int) -> None:
        """All engines that run have reported what they did so far."""
        for running in self._running.values():
            running.reported_until_ns = until_ns

    def check_alive(self, silent_s: float) -> None:
        """Says that no sample has come for so long and, beyond the cards' patience, ends the run.

        Raises:
            CardFailed: names the engines that run, and what they have.
        """
        if silent_s < min(self._said_s + WARN_EVERY_S, self._cards.timeout_s):
            self._said_s = min(self._said_s, silent_s)
            return
        self._said_s = silent_s
        held = {engine: self.buffer.num_running_on(engine) for engine in self._running}
        told = ", ".join(f"engine {n} (ranks {list(self._spec.engines[n])}) has {held[n]} samples" for n in held)
        if silent_s > self._cards.timeout_s:
            hangs = self._cards.describe_unresponsive([rank for n in held for rank in self._spec.engines[n]])
            raise CardFailed(f"no sample has come for {silent_s:.0f} s (cluster.stage_timeout_s): {told}{hangs}")
        log.warning("no sample has come for %.0f s: %s", silent_s, told)

    def of_cards(self, ranks: Iterable[int]) -> list[int]:
        """The engines that have one of these cards."""
        wanted = set(ranks)
        return [number for number, engine in enumerate(self._spec.engines) if wanted & set(engine)]

    def leave(self, group: str) -> list[Entry]:
        """The group is generated; it is somebody else's from now on."""
        del self.prompts[group]
        return self.buffer.remove(group)

    def answer(self, prompts: Sequence[Prompt], engines: Sequence[int]) -> dict[str, EvalAnswer]:
        """Answers each prompt once; returns the answers by the prompt's id. Where a reward model is to score them,
        their tokens are kept in the queue, in rows that no task gets. No engine runs."""
        assert not self._running, "engines are suspended before they answer"
        load = {prompt.id: len(prompt.ids) for prompt in prompts}
        requests = {prompt.id: Request(prompt.id, prompt.ids, self._sampling, prompt.id) for prompt in prompts}
        rows = f"eval/{uuid4().hex}/" if self._spec.reward_model else ""
        calls: dict[int, StageCall[StageReport]] = {}
        for engine, ids in zip(engines, assign_groups(load, [0] * len(engines)), strict=True):
            first, *others = self._spec.engines[engine]
            calls[first] = stage_call(Worker.answer, [requests[id] for id in ids], rows)
            calls |= {rank: stage_call(Worker.answer, [], rows) for rank in others}
        reports = self._cards.call_each(calls)
        return {answer.id: answer for report in reports for answer in report.answers}

    def _request(self, entry: Entry) -> Request:
        prompt, member = self.prompts[entry.group], int(entry.id.rsplit("/", 1)[1])
        exact = self._lengths(prompt.id, member) if self._lengths else 0
        return Request(
            entry.id,
            prompt.ids,
            self._sampling,
            entry.group,
            chunk_tokens=self._spec.rollout.chunk_tokens or 0,
            exact_tokens=exact,
            earlier=entry.earlier,
            kv_rank=entry.kv[1] if entry.kv else None,
        )
