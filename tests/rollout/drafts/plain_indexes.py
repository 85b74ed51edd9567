"""`SuffixIndexes` in Python, to compare with: the structure and the order of ties of `suffix_index.cpp` and
`phrases.h`, which explain both. Phrases have room here for all contexts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from fusion.rollout.drafts.suffix_index import HISTORY, PHRASES, SIBLING, Drafts

ROOT, NONE = 0, -1
MAX_COUNTED = 64
"""Suffixes of a token that are counted, or passed over"""

MAX_FOLLOWERS = 128
"""Tokens behind a string that are looked at, those that have followed it first"""

DOUBT, MIN_WEIGHT = 2, 1 / 64
"""Weight of shorter suffixes beside what has followed a longer one; least weight that is looked up"""

MAX_CONTEXT, FOLLOWERS, MAX_TOTAL, PHRASE_DOUBT = 4, 4, 1024, 8

Node = tuple[int, int, float, float, int]
"""Token, parent, share, probability, source"""
Child = tuple[int, int, int, float, int]
"""Token, state, tokens up to this one that its strings end with, share, source"""


@dataclass(slots=True)
class State:
    """``length``: of its longest string; ``link``: state of the longest suffix that occurs elsewhere too; ``edges``:
    token → state; ``count``: occurrences by source, weighted."""

    length: int
    link: int = NONE
    edges: dict[int, int] = field(default_factory=dict)
    count: list[int] = field(default_factory=lambda: [0, 0])


class Phrases:
    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """Context → (token, count), or (0, 0) for a free place"""
        self.totals: dict[tuple[int, ...], int] = {}

    def add(self, context: Sequence[int], token: int) -> None:
        for order in range(1, len(context) + 1):
            self._count(tuple(context[-order:]), token)

    def _count(self, key: tuple[int, ...], token: int) -> None:
        places = self.followers.setdefault(key, [(0, 0)] * FOLLOWERS)
        known = [i for i, (one, count) in enumerate(places) if count and one == token]
        least = min(range(FOLLOWERS), key=lambda i: places[i][1])
        if known:
            places[known[0]] = token, places[known[0]][1] + 1
        elif places[least][1] <= 1:
            places[least] = token, 1
        else:
            places[least] = places[least][0], places[least][1] - 1
        self.totals[key] = self.totals.get(key, 0) + 1
        if self.totals[key] == MAX_TOTAL:
            self.totals[key] //= 2
            places[:] = [(one, count // 2) for one, count in places]


class _Index:
    def __init__(self, prompt: Sequence[int], min_match: int, max_match: int, phrases: Phrases | None = None) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._states, self._start = [State(0)], ROOT
        self._phrases, self._contexts, self._prompt_end = phrases, list[list[int]](), list[int]()
        """The last tokens of each sequence, and of the prompt"""
        self._sequences: list[tuple[int, int, bool]] = []
        """Source and weight, and whether its tokens count as phrases"""
        self._ends: list[int] = []
        """State of all tokens of a sequence, prompt included"""
        self.extend(self.open(SIBLING, 1, False), prompt)
        self._start, self._prompt_end = self._ends[0], self._contexts[0]

    @property
    def nbytes(self) -> int:
        """About what the objects take."""
        return 400 * len(self._states)

    def open(self, source: int, weight: int, is_new: bool) -> int:
        self._sequences.append((source, weight, is_new))
        self._ends.append(self._start)
        self._contexts.append(self._prompt_end)
        return len(self._ends) - 1

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        states, state, (source, weight, is_new) = self._states, self._ends[sequence], self._sequences[sequence]
        for token in map(int, tokens):
            context = self._contexts[sequence]
            if self._phrases is not None and is_new:
                self._phrases.add(context, token)
            self._contexts[sequence] = [*context, token][-MAX_CONTEXT:]
            state = counted = self._append(state, token)
            for _ in range(MAX_COUNTED):
                if states[counted].length < self._min_match:
                    break
                states[counted].count[source] += weight
                counted = states[counted].link
        self._ends[sequence] = state

    def draft(
        self, sequence: int, depth: int, nodes: int, max_children: int, acceptance: np.ndarray, least: float
    ) -> list[Node]:
        found: list[Node] = []
        proposed: list[tuple[float, int, int, int, list[int], Child]] = []
        rank = 0

        def propose(state: int, matched: int, context: list[int], parent: int, at: int, path: float) -> None:
            nonlocal rank
            for child in self._children(state, matched, context, max_children) if at <= depth else ():
                share = child[3]
                probability = path * float(acceptance[min(int(share * len(acceptance)), len(acceptance) - 1)])
                if probability >= least:
                    behind = [*context, child[0]][-MAX_CONTEXT:]
                    heapq.heappush(proposed, (-probability, rank, parent, at, behind, child))
                    rank += 1

        propose(self._ends[sequence], self._max_match, self._contexts[sequence], NONE, 1, 1.0)
        while proposed and len(found) < nodes:
            negative, _, parent, at, context, (token, target, matched, share, source) = heapq.heappop(proposed)
            found.append((token, parent, share, -negative, source))
            propose(target, matched, context, len(found) - 1, at + 1, -negative)
        return found

    def _children(self, state: int, matched: int, context: list[int], max_children: int) -> list[Child]:
        states, children = self._states, dict[int, Child]()
        order, weight = len(context) if self._phrases is not None else 0, 1.0

        def add(token: int, target: int, matched: int, share: float, source: int) -> None:
            known = children.get(token, (token, target, matched, 0.0, source))
            longest = (token, target, matched, 0.0, source) if matched > known[2] else known
            children[token] = (*longest[:3], known[3] + share, longest[4])

        def add_phrases(above: int) -> None:
            nonlocal order, weight
            for size in range(order, above, -1):
                if weight <= MIN_WEIGHT:
                    break
                order, key = size - 1, tuple(context[-size:])
                total = self._phrases.totals.get(key, 0) if self._phrases is not None else 0
                if not total:
                    continue
                for token, count in self._phrases.followers[key]:
                    if not count:
                        continue
                    target = states[ROOT].edges.get(token, ROOT)
                    add(token, target, int(target != ROOT), count * (weight / (total + PHRASE_DOUBT)), PHRASES)
                weight *= PHRASE_DOUBT / (total + PHRASE_DOUBT)

        matched = min(matched, self._max_match, states[state].length)
        for _ in range(MAX_COUNTED):
            link = states[state].link
            if link == NONE or states[link].length < matched:
                break
            state = link
        while matched >= self._min_match and weight > MIN_WEIGHT:
            add_phrases(matched)
            edges = dict(islice(states[state].edges.items(), MAX_FOLLOWERS))
            counts = {token: count for token, target in edges.items() if (count := sum(states[target].count))}
            total = sum(counts.values())
            if len(edges) < len(states[state].edges):
                total = max(total, sum(states[state].count))
            for token, count in counts.items():
                target, share = edges[token], count * (weight / (total + DOUBT))
                by_source = states[target].count
                source = HISTORY if by_source[HISTORY] > by_source[SIBLING] else SIBLING
                add(token, target, matched + 1, share, source)
            weight *= DOUBT / (total + DOUBT)
            state = states[state].link
            matched = 0 if state == NONE else min(matched, states[state].length)
        add_phrases(0)
        return sorted(children.values(), key=lambda child: (-child[3], child[0]))[:max_children]

    def _append(self, last: int, token: int) -> int:
        states = self._states
        target = states[last].edges.get(token)
        if target is not None:
            return target if states[target].length == states[last].length + 1 else self._split(last, token, target)
        added, state = len(states), last
        states.append(State(states[last].length + 1))
        while state != NONE and token not in states[state].edges:
            states[state].edges[token] = added
            state = states[state].link
        link = ROOT
        if state != NONE:
            link = states[state].edges[token]
            if states[link].length != states[state].length + 1:
                link = self._split(state, token, link)
        states[added].link = link
        return added

    def _split(self, owner: int, token: int, whole: int) -> int:
        states, part = self._states, len(self._states)
        old = states[whole]
        states.append(State(states[owner].length + 1, old.link, dict(old.edges), list(old.count)))
        old.link, state = part, owner
        while state != NONE and states[state].edges.get(token) == whole:
            states[state].edges[token] = part
            state = states[state].link
        return part


class PlainIndexes:
    def __init__(self, phrase_bytes: int = 0) -> None:
        self._indexes: dict[int, _Index] = {}
        self._created = 0
        self._phrases = Phrases() if phrase_bytes else None

    def new(self, prompt: Sequence[int], min_match: int, max_match: int) -> int:
        number, self._created = self._created, self._created + 1
        self._indexes[number] = _Index(prompt, min_match, max_match, self._phrases)
        return number

    def open(self, index: int, source: int, weight: int = 1, *, is_new: bool = True) -> int:
        return self._indexes[index].open(source, weight, is_new)

    def extend(self, places: Sequence[tuple[int, int]], texts: Sequence[Sequence[int]]) -> None:
        for (index, sequence), text in zip(places, texts, strict=True):
            self._indexes[index].extend(sequence, text)

    def draft(
        self,
        places: Sequence[tuple[int, int]],
        max_depth: Sequence[int],
        max_nodes: Sequence[int],
        acceptance: np.ndarray,
        max_children: int = 1,
        min_probability: float = 0.0,
    ) -> Drafts:
        drafts = [
            self._indexes[index].draft(sequence, depth, nodes, max_children, acceptance, min_probability)
            for (index, sequence), depth, nodes in zip(places, max_depth, max_nodes, strict=True)
        ]
        rows = [node for draft in drafts for node in draft]
        tokens, parents, shares, probabilities, sources = zip(*rows, strict=True) if rows else ((),) * 5
        return Drafts(
            offsets=np.cumsum([0, *map(len, drafts)]),
            tokens=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            shares=np.array(shares, np.float64),
            probabilities=np.array(probabilities, np.float64),
            sources=np.array(sources, np.uint8),
        )

    def remove(self, index: int) -> None:
        del self._indexes[index]

    def nbytes_of(self, index: int) -> int:
        return self._indexes[index].nbytes

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._indexes.values())
