"""Draft for the sequences of an engine, from the responses that it has seen to the same prompts.

    tokens of running sequences ─ extend ─► index of their prompt ─ draft ─► budget ─► drafts ─► engine
    sequences that end ────────────────────────┘   ▲                           ▲                   │
    the next group of the prompt: what the last one said becomes history       └── kept, seconds ──┘

An index belongs to a prompt, whichever epoch it comes from. Where the text exceeds `max_bytes`, prompts without running
requests are dropped, those used longest ago first; then the others, whose running requests are not drafted for any
more. Every rank with the same schedule makes the same drafts, as they depend only on the calls.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from fusion.inference.config import RolloutConfig
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Draft, StepCost, Verification
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING, Drafts, SuffixIndexes, make_indexes

MIN_MATCH = 3
"""Tokens of a sequence that must occur elsewhere for a draft (RhymeRL, arXiv 2508.18588: 7 down to 3)"""

MAX_PROMPT = 1024
"""Tokens at the end of a prompt that are indexed"""


@dataclass
class _Prompt:
    """``groups``: whose responses are the siblings, several if one was begun before the others had ended; ``numbers``:
    request → sequence in the index; ``texts``: request → its response so far; ``history``: what is in the index of the
    last group."""

    key: bytes
    index: int
    history: list[array[int]]
    groups: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, array[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of texts and history, which are held besides the index."""
        return sum(map(len, self.texts.values())) + sum(map(len, self.history))


@dataclass
class DraftTotals:
    """Totals since construction. ``asked``: sequences for which a draft was looked up; ``found``: for which there was
    one; ``drafted``, ``accepted``: tokens verified and kept, by source; ``seconds``: of looking up."""

    asked: int = 0
    found: int = 0
    seconds: float = 0.0
    drafted: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])


class TextDrafter:
    """Implements `Drafter`.

    Args:
        siblings: draft from the responses of the same group; ``history``: from those of the prompt's last group.
        max_children: tokens of a draft behind one; 1: drafts are single paths.
        max_depth: tokens of a path.
        max_bytes: of all text, indexed.
        clock: seconds, for the totals only.
    """

    def __init__(
        self,
        indexes: SuffixIndexes,
        *,
        siblings: bool = True,
        history: bool = True,
        max_children: int = 1,
        max_depth: int = 16,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._indexes, self._siblings, self._history = indexes, siblings, history
        self._max_children, self._max_depth, self._max_bytes = max_children, max_depth, max_bytes
        self.budget, self.totals, self._clock = DraftBudget(), DraftTotals(), clock
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        """By a digest of the prompt, the one used last at the end"""
        self._live: dict[str, _Prompt | None] = {}
        """Requests in the engine; None: its prompt was dropped, it is not read any more"""
        self._num_tokens = 0
        """Of the texts and histories of all prompts"""
        self._drafted: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Sequence → shares and sources of the tokens of its draft that is being verified"""

    @classmethod
    def of(cls, config: RolloutConfig) -> TextDrafter | None:
        """Creates the drafter that a config asks for."""
        if config.drafts == "none":
            return None
        return cls(
            make_indexes(),
            siblings=config.drafts_siblings,
            history=config.drafts in ("history", "both"),
            max_children=config.draft_tree,
            max_bytes=config.draft_mib << 20,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the indexes, and of the texts beside them."""
        return self._indexes.nbytes + self._num_tokens * array("i").itemsize

    def draft(self, sequences: Items[Sequence], max_depth: Items[int], max_tokens: int) -> list[Draft | None]:
        began_s = self._clock()
        drafts = self._draft(sequences, max_depth, max_tokens)
        self.totals.seconds += self._clock() - began_s
        return drafts

    def _draft(self, sequences: Items[Sequence], max_depth: Items[int], max_tokens: int) -> list[Draft | None]:
        self._drafted.clear()  # a draft that found no room was not verified
        self._drop_oldest()
        read = self._read(sequences)
        drafts: list[Draft | None] = [None] * len(sequences)
        places = [place for _, place in read]
        if not places or self.budget.skips(len(sequences)):
            return drafts
        depths = [min(max_depth[i], self._max_depth) for i, _ in read]
        nodes = [depth * self._max_children for depth in depths]
        acceptance = self.budget.acceptance.by_share()
        found = self._indexes.draft(places, depths, nodes, acceptance, self._max_children)
        self.totals.asked += len(places)
        self.totals.found += int(np.count_nonzero(np.diff(found.offsets)))
        owners = np.repeat(np.arange(len(places)), np.diff(found.offsets))
        chosen = self.budget.choose(owners, found.probabilities, len(sequences), max_tokens)
        for n, (i, _) in enumerate(read):
            drafts[i] = self._draft_of(sequences[i], found, chosen, n)
        return drafts

    def observe(self, one: Verification, kept: Items[int]) -> None:
        """Records which rows of a verification were kept."""
        shares, sources = self._drafted.pop(id(one.seq))
        is_kept, rows = np.zeros(len(one), bool), np.array(one.rows)
        is_kept[list(kept)] = True
        accepted, was_tried = is_kept[rows], is_kept[np.array(one.parents)[rows]]
        self.budget.acceptance.observe(shares[was_tried], accepted[was_tried])
        for source in (SIBLING, HISTORY):
            self.totals.drafted[source] += int(np.count_nonzero(sources == source))
            self.totals.accepted[source] += int(np.count_nonzero(accepted[sources == source]))

    def observe_step(self, cost: StepCost) -> None:
        self.budget.observe_step(cost)

    def end(self, seq: Sequence) -> None:
        """Reads the last tokens of a sequence that leaves the engine."""
        if seq.request.id not in self._live and len(seq.tokens) == seq.first_token + len(seq.request.response):
            return  # it never ran
        self._read([seq])
        prompt = self._live.pop(seq.request.id)
        if prompt is not None:
            prompt.live.discard(seq.request.id)

    def _read(self, sequences: Items[Sequence]) -> list[tuple[int, tuple[int, int]]]:
        """Appends the sequences' new tokens to their indexes; returns the place of each that is read, by its number."""
        places: list[tuple[int, tuple[int, int]]] = []
        changed: list[tuple[int, int]] = []
        new: list[array[int]] = []
        for i, seq in enumerate(sequences):
            request = seq.request.id
            if request not in self._live:
                self._begin(seq)
            prompt = self._live[request]
            if prompt is None:
                continue
            text, place = prompt.texts[request], (prompt.index, prompt.numbers[request])
            places.append((i, place))
            known = seq.first_token + len(text)
            if known < len(seq.tokens):
                tokens = array("i", seq.tokens[known:])
                text.extend(tokens)
                changed.append(place)
                new.append(tokens)
                self._num_tokens += len(tokens)
        if changed:
            self._indexes.extend(changed, new)
        return places

    def _begin(self, seq: Sequence) -> None:
        """Adds a request to the index of its prompt: where it left, if its response goes on from there."""
        request = seq.request
        key = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=16).digest()
        prompt = self._prompts.get(key)
        text = None if prompt is None else prompt.texts.get(request.id)
        goes_on = text is not None and list(text) == seq.tokens[seq.first_token : seq.first_token + len(text)]
        is_new = request.group not in prompt.groups or (text and not goes_on) if prompt is not None else True
        if prompt is None or (is_new and not prompt.live):
            prompt, goes_on = self._begin_group(key, request.prompt, last=prompt), False
        if not goes_on:
            self._num_tokens -= len(prompt.texts.get(request.id, ()))
            prompt.numbers[request.id] = self._indexes.open(prompt.index, SIBLING, 1 if self._siblings else 0)
            prompt.texts[request.id] = array("i")
            prompt.groups.add(request.group)
        prompt.live.add(request.id)
        self._live[request.id] = prompt
        self._prompts.move_to_end(key)

    def _begin_group(self, key: bytes, tokens: Items[int], last: _Prompt | None) -> _Prompt:
        """Creates the index of a prompt for another group, with what the last one said as history."""
        history: list[array[int]] = []
        if last is not None:
            if self._history:  # a group that said nothing, because it was aborted, leaves the history as it is
                history = [text for text in last.texts.values() if text] or last.history
            self._drop(last)
        index = self._indexes.new(tokens[-MAX_PROMPT:], MIN_MATCH)
        self._indexes.extend([(index, self._indexes.open(index, HISTORY)) for _ in history], history)
        prompt = self._prompts[key] = _Prompt(key, index, history)
        self._num_tokens += prompt.num_tokens
        return prompt

    def _drop_oldest(self) -> None:
        while self.nbytes > self._max_bytes and self._prompts:
            prompts = self._prompts.values()
            oldest = next((prompt for prompt in prompts if not prompt.live), None) or next(iter(prompts))
            for request in oldest.live:
                self._live[request] = None
            self._drop(oldest)

    def _drop(self, prompt: _Prompt) -> None:
        self._indexes.remove(prompt.index)
        self._num_tokens -= prompt.num_tokens
        del self._prompts[prompt.key]

    def _draft_of(self, seq: Sequence, drafts: Drafts, chosen: np.ndarray, n: int) -> Draft | None:
        rows = drafts.of(n)
        count = int(np.count_nonzero(chosen[rows]))  # of a draft, what comes first is chosen first
        if not count:
            return None
        rows = slice(rows.start, rows.start + count)
        self._drafted[id(seq)] = drafts.shares[rows], drafts.sources[rows]
        return Draft(drafts.tokens[rows].tolist(), drafts.parents[rows].tolist())
