"""Draft for the sequences of an engine, from the responses that it has seen to the same prompts.

    tokens of running sequences ─ extend ─► index of their prompt ─ draft ─► budget ─► drafts ─► engine
    sequences that end ────────────────────────┘   ▲   ▲                       ▲                   │
    the next group of the prompt: what the last one said becomes history       └── kept, seconds ──┘
    what other engines have generated for it (`exchange`) ─┘

An index belongs to a prompt, whichever epoch it comes from. Where the text exceeds `max_bytes`, prompts without running
requests are dropped, those used longest ago first; then the others, whose running requests are not drafted for any
more; likewise a prompt whose own text exceeds `max_group_bytes`. Every rank with the same schedule makes the same
drafts, as they depend only on the calls.
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
from fusion.inference.request import Request
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Draft, StepCost, Verification
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.exchange import TextExchange
from fusion.rollout.drafts.pieces import Piece, decode
from fusion.rollout.drafts.prompt import Prompt
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING, Drafts, SuffixIndexes, make_indexes
from fusion.rollout.drafts.window import WindowBudget

MIN_MATCH, MAX_MATCH = 3, 7
"""Tokens of a sequence that must occur elsewhere for a draft, and that are compared (RhymeRL, arXiv 2508.18588: 7 down
to 3): the more are compared, the fewer places say what follows"""

MAX_PROMPT = 1024
"""Tokens at the end of a prompt that are indexed"""


UNCHECKED_TOKENS = 256
"""By which the text of a prompt may grow until its bytes are counted again"""


@dataclass
class DraftTotals:
    """Totals since construction. ``asked``: sequences for which a draft was looked up; ``found``: for which there was
    one; ``verified``: drafts that were; ``drafted``, ``accepted``: their tokens, and those kept, by source;
    ``seconds``: of looking up; ``read``: tokens of other engines that were added to an index, ``unread``: that were
    not, as nothing here could use them; ``dropped``, ``expired``: prompts whose text found no room, or was not used for
    too long."""

    asked: int = 0
    found: int = 0
    verified: int = 0
    seconds: float = 0.0
    read: int = 0
    unread: int = 0
    dropped: int = 0
    expired: int = 0
    drafted: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])


class TextDrafter:
    """Implements `Drafter`.

    Args:
        siblings: draft from the responses of the same group; ``history``: from those of the prompt's last groups.
        max_history: of these groups; text counts half as much as that of the next one.
        max_children: tokens of a draft behind one; 1: drafts are single paths.
        max_depth: tokens of a path, at most; None: as the budget says.
        budget: how much of the drafts is verified; None: `DraftBudget`.
        max_bytes: of all text, indexed; ``max_group_bytes``: of one prompt's, its last group included.
        max_age: policy versions after which the text of a prompt that no request has used is dropped; None: never.
        clock: seconds, for the totals only.
    """

    def __init__(
        self,
        indexes: SuffixIndexes,
        *,
        siblings: bool = True,
        history: bool = True,
        max_history: int = 1,
        max_children: int = 1,
        max_depth: int | None = None,
        max_bytes: int = 1 << 30,
        max_group_bytes: int = 1 << 28,
        max_age: int | None = None,
        budget: DraftBudget | WindowBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._indexes, self._siblings, self._history = indexes, siblings, history
        self._max_history, self._newest_weight = max_history, 1 << (max_history - 1)
        self._max_children, self._max_depth = max_children, max_depth
        self._max_bytes, self._max_group_bytes = max_bytes, max_group_bytes
        self.budget: DraftBudget | WindowBudget = budget or DraftBudget()
        self.totals, self._clock = DraftTotals(), clock
        self.exchange: TextExchange | None = None
        """With other engines, on the first rank of those with one schedule"""
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()
        """By a digest of the prompt, the one used last at the end"""
        self._grown: dict[bytes, None] = {}
        """Prompts whose text has grown by more than `UNCHECKED_TOKENS` since its bytes were counted"""
        self._live: dict[str, Prompt | None] = {}
        """Requests in the engine; None: its prompt was dropped, it is not read any more"""
        self._restored: dict[bytes, list[list[array[int]]]] = {}
        """History that was loaded, of prompts that have had no request since, those used longest ago first"""
        self._restored_version: int | None = None
        """The first policy since then"""
        self._version, self._max_age = 0, max_age
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
            history=config.drafts_history,
            max_history=config.draft_history,
            max_children=config.draft_tree,
            max_bytes=config.draft_mib << 20,
            max_group_bytes=config.draft_group_mib << 20,
            max_age=config.draft_max_age,
            budget=WindowBudget() if config.draft_budget == "window" else DraftBudget(),
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
        drafts: list[Draft | None] = [None] * len(sequences)
        if self.budget.skips(len(sequences)):
            return drafts  # what is generated meanwhile is read at once later: that takes less time
        self._drop_oldest()
        read = self._read(sequences)
        places = [place for _, place in read]
        if not places:
            return drafts
        limit = 1 << 30 if self._max_depth is None else self._max_depth
        depths = [min(max_depth[i], limit, self.budget.max_depth(sequences[i].request.id)) for i, _ in read]
        nodes = [depth * self._max_children for depth in depths]
        acceptance = self.budget.acceptance.by_share()
        found = self._indexes.draft(places, depths, nodes, acceptance, self._max_children)
        self.totals.asked += len(places)
        self.totals.found += int(np.count_nonzero(np.diff(found.offsets)))
        owners = np.repeat(np.arange(len(places)), np.diff(found.offsets))
        urgent = np.array([sequences[i].request.priority == 0 for i, _ in read])[owners]
        chosen = self.budget.choose(owners, found.probabilities, len(sequences), max_tokens=max_tokens, urgent=urgent)
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
        self.budget.observe_draft(one.seq.request.id, max(one.depths), len(kept) - 1)
        self.totals.verified += 1
        for source in (SIBLING, HISTORY):
            self.totals.drafted[source] += int(np.count_nonzero(sources == source))
            self.totals.accepted[source] += int(np.count_nonzero(accepted[sources == source]))

    def observe_step(self, cost: StepCost) -> None:
        self.budget.observe_step(cost)

    def adopt(self, version: int) -> None:
        self._version = version
        if self._restored_version is None:
            self._restored_version = version
        if self._max_age is None:
            return
        oldest = version - self._max_age
        expired = [one for one in self._prompts.values() if one.version < oldest and not one.live]
        for prompt in expired:
            self._forget(prompt)
        self.totals.expired += len(expired)
        for key in [*self._restored] if self._restored_version < oldest else ():
            self._drop_restored(key)
            self.totals.expired += 1

    def news(self) -> bytes:
        if self.exchange is None:
            return b""
        return self.exchange.news({prompt.key for prompt in self._live.values() if prompt}, self._version)

    def flush(self) -> None:
        """Sends the text that other engines do not know yet: this one stops."""
        if self.exchange is not None:
            self.exchange.flush(self._version)

    def read(self, news: bytes) -> None:
        _, pieces = decode(news)
        for piece in pieces:
            count = self._read_piece(piece)
            self.totals.read += count
            self.totals.unread += len(piece.tokens) - count

    def end(self, seq: Sequence) -> None:
        """Reads the last tokens of a sequence that leaves the engine."""
        if seq.request.id not in self._live and len(seq.tokens) == seq.first_token + len(seq.request.response):
            return  # it never ran
        self._read([seq])
        self.budget.end(seq.request.id)
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
                self._count(prompt, len(tokens))
                if self.exchange is not None:
                    known = len(seq.request.response)
                    self.exchange.note(prompt.key, seq.request.group, request, text, known)
        if changed:
            self._indexes.extend(changed, new)
        return places

    def _begin(self, seq: Sequence) -> None:
        """Adds a request to the index of its prompt: where it left, if its response goes on from there."""
        request = seq.request
        key = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=16).digest()
        prompt = self._prompts.get(key)
        if prompt is not None and prompt.live:
            prompt.join(request.group)
        text = None if prompt is None else prompt.texts.get(request.id)
        goes_on = text is not None and list(text) == seq.tokens[seq.first_token : seq.first_token + len(text)]
        is_new = request.group not in prompt.groups or (text and not goes_on) if prompt is not None else True
        if prompt is None or (is_new and not prompt.live):
            prompt, goes_on = self._begin_group(key, request, last=prompt), False
        if not goes_on:
            self._open(prompt, prompt.texts, request.id)
        prompt.live.add(request.id)
        prompt.version = self._version
        self._live[request.id] = prompt
        self._prompts.move_to_end(key)

    def _begin_group(self, key: bytes, request: Request, last: Prompt | None) -> Prompt:
        """Creates the index of a prompt for another group, with what the last one said as history."""
        history: list[list[array[int]]] = []
        begun: dict[str, array[int]] = {}
        if last is None:
            history = self._drop_restored(key)
        else:
            begun = last.past.get(request.group, {})
            if self._history:  # a group that said nothing, because it was aborted, leaves the history as it is
                history = last.next_history(self._max_history, request.group)
            self._drop(last)
            if self.exchange is not None:
                self.exchange.end_group(key)
        index = self._indexes.new(request.prompt[-MAX_PROMPT:], MIN_MATCH, MAX_MATCH)
        for age, texts in enumerate(history):
            weight = self._newest_weight >> age
            self._indexes.extend([(index, self._indexes.open(index, HISTORY, weight)) for _ in texts], texts)
        prompt = self._prompts[key] = Prompt(key, self._version, index, history)
        prompt.join(request.group)
        self._count(prompt, prompt.num_tokens)
        for name, text in begun.items():
            self._append(prompt, self._open(prompt, prompt.texts, name), name, text)
        return prompt

    def _open(self, prompt: Prompt, texts: dict[str, array[int]], request: str) -> array[int]:
        """Begins a response, ``texts``: those of its group; a request that is generated again has no other."""
        source = SIBLING if texts is prompt.texts else HISTORY
        weight = self._newest_weight if source == HISTORY or self._siblings else 0
        prompt.numbers[request] = self._indexes.open(prompt.index, source, weight)
        self._num_tokens -= len(texts.get(request, ()))
        text = texts[request] = array("i")
        return text

    def _append(self, prompt: Prompt, text: array[int], request: str, tokens: array[int]) -> None:
        self._indexes.extend([(prompt.index, prompt.numbers[request])], [tokens])
        text.extend(tokens)
        self._count(prompt, len(tokens))

    def _count(self, prompt: Prompt, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        prompt.unchecked += num_tokens
        if prompt.unchecked > UNCHECKED_TOKENS:
            self._grown[prompt.key] = None

    def _read_piece(self, piece: Piece) -> int:
        """Adds what another engine has generated to the index of its prompt; returns the number of tokens added."""
        prompt = self._prompts.get(piece.prompt)
        if prompt is None or piece.request in prompt.live:
            return 0
        is_sibling = piece.group in prompt.groups
        if not (is_sibling or self._history):
            return 0
        texts = prompt.texts if is_sibling else prompt.past.setdefault(piece.group, {})
        text = texts.get(piece.request, array("i"))
        known = text[piece.start : piece.end]
        if piece.start > len(text) or (piece.start and known != piece.tokens[: len(known)]):
            return 0
        if piece.request not in texts or known != piece.tokens[: len(known)]:  # new, or generated again
            text, known = self._open(prompt, texts, piece.request), array("i")
        self._append(prompt, text, piece.request, piece.tokens[len(known) :])
        return len(piece.tokens) - len(known)

    def history(self, max_tokens: int) -> list[Piece]:
        """Return what the next group of each prompt would have as history, of the prompts used last first, for
        `load_history`."""
        groups_by_prompt = list(self._restored.items())
        groups_by_prompt += [(key, prompt.next_history(self._max_history)) for key, prompt in self._prompts.items()]
        pieces: list[Piece] = []
        for key, groups in reversed(groups_by_prompt if self._history else []):
            texts = [(age, text) for age, texts in enumerate(groups) for text in texts]
            max_tokens -= sum(len(text) for _, text in texts)
            if max_tokens < 0:
                break
            pieces += [Piece(key, str(age), str(number), 0, text[:]) for number, (age, text) in enumerate(texts)]
        return pieces

    def load_history(self, pieces: Items[Piece]) -> None:
        """Load what `history` has returned into a drafter that has seen nothing yet."""
        self._restored_version = None
        ages = {str(age): age for age in range(self._max_history)} | {"": 0}
        for piece in reversed(pieces) if self._history else ():
            age = ages.get(piece.group)
            if age is None:  # saved by a run that kept more
                continue
            groups = self._restored.setdefault(piece.prompt, [])
            groups += [[] for _ in range(age + 1 - len(groups))]
            groups[age].insert(0, piece.tokens)
            self._num_tokens += len(piece.tokens)

    def _drop_oldest(self) -> None:
        for key in self._grown:
            prompt = self._prompts.get(key)
            if prompt is None:
                continue
            prompt.unchecked = 0
            nbytes = self._indexes.nbytes_of(prompt.index) + prompt.num_tokens * array("i").itemsize
            if nbytes > self._max_group_bytes:
                self._drop_running(prompt)
        self._grown.clear()
        while self.nbytes > self._max_bytes and self._restored:
            self._drop_restored(next(iter(self._restored)))
            self.totals.dropped += 1
        while self.nbytes > self._max_bytes and self._prompts:
            prompts = self._prompts.values()
            self._drop_running(next((prompt for prompt in prompts if not prompt.live), None) or next(iter(prompts)))

    def _drop_running(self, prompt: Prompt) -> None:
        """Drops a prompt for which there is no room; its running requests are not drafted for any more."""
        for request in prompt.live:
            self._live[request] = None
        self._forget(prompt)
        self.totals.dropped += 1

    def _drop_restored(self, key: bytes) -> list[list[array[int]]]:
        groups = self._restored.pop(key, [])
        self._num_tokens -= sum(len(text) for texts in groups for text in texts)
        return groups

    def _forget(self, prompt: Prompt) -> None:
        """Drops a prompt; what other engines have is asked for again if a request of it comes."""
        self._drop(prompt)
        if self.exchange is not None:
            self.exchange.forget(prompt.key)

    def _drop(self, prompt: Prompt) -> None:
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
