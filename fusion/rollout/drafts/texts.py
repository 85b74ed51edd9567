"""Keep the texts of the prompts that an engine answers, and index them where drafts are looked up.

    running sequences ─ read ─► texts of their prompt ─ index ─► places in its index, for `SuffixIndexes.draft`
    sequences that end ─ end ──┘   ▲   ▲
    the next group of the prompt: the responses of the last one become history, weighed by its rewards
    what other engines have generated for it (`exchange`)

An index belongs to a prompt, whichever epoch it comes from, and is created and extended only when drafts for the prompt
are looked up: a text of which none are costs no more than to be kept. Where text and indexes exceed `max_bytes`,
prompts without running requests are dropped, those used longest ago first; then the others, whose running requests are
not drafted for any more; so is a prompt whose own text exceeds `max_group_bytes`. What is kept depends only on the
calls."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from fusion.inference.config import DraftsConfig
from fusion.inference.request import Request
from fusion.inference.sequence import Sequence
from fusion.rollout.drafts.exchange import TextExchange
from fusion.rollout.drafts.pieces import TextPiece
from fusion.rollout.drafts.prompt import History, PastResponse, PromptText, rewarded
from fusion.rollout.drafts.rewards import NEUTRAL, weights_of
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING, SuffixIndexes
from fusion.rollout.drafts.text_client import TextClient

MIN_MATCH, MAX_MATCH = 1, 7
"""Tokens of a sequence that must occur elsewhere for a draft, and that are compared (RhymeRL, arXiv 2508.18588: 7 down
to 3). One word may say enough, of characters it takes several: the index weighs them by what followed"""
MAX_PROMPT = 1024
"""Tokens at the end of a prompt that are indexed"""
MAX_PHRASE_BYTES = 40 << 20
"""A million contexts"""
UNCHECKED_TOKENS = 256
"""Tokens by which the text of a prompt may grow until its bytes are counted again"""
Place = tuple[int, int]
"""Index, and sequence in it"""


@dataclass(frozen=True)
class TextSpec:
    """What is kept and drafted from. ``siblings``: draft from the responses of the same group; ``history``: from those
    of the prompt's last groups, the better rewarded ones first (`Request.last_rewards`); ``max_history``: of these
    groups; text counts half as much as that of the next one; ``max_bytes``: of all text, indexed; ``max_group_bytes``:
    of one prompt's, its last group included; ``max_age``: policy versions after which the text of a prompt that no
    request has used is dropped; None: never."""

    siblings: bool = True
    history: bool = True
    max_history: int = 1
    max_bytes: int = 1 << 30
    max_group_bytes: int = 1 << 28
    max_age: int | None = None

    @classmethod
    def of(cls, config: DraftsConfig) -> TextSpec:
        return cls(
            siblings=config.from_siblings,
            history=config.from_history,
            max_history=config.history,
            max_bytes=config.mib << 20,
            max_group_bytes=config.group_mib << 20,
            max_age=config.max_age,
        )

    @property
    def phrase_bytes(self) -> int:
        """Maximum number of ``max_bytes`` for the phrases of all prompts."""
        return min(self.max_bytes // 8, MAX_PHRASE_BYTES)


@dataclass
class DraftTotals:
    """What a drafter has done since construction. ``asked``: sequences for which a draft was looked up; ``found``: for
    which there was one; ``verified``: drafts that were; ``drafted``, ``accepted``: their tokens, and those kept, by
    source; ``seconds``: of keeping text, looking up, and recording what was kept; ``read``: tokens of other engines
    that were added to a text, ``unread``: that were not, as nothing here could use them; ``dropped``, ``expired``:
    prompts whose text found no room, or was not used for too long."""

    asked: int = 0
    found: int = 0
    verified: int = 0
    seconds: float = 0.0
    read: int = 0
    unread: int = 0
    dropped: int = 0
    expired: int = 0
    drafted: list[int] = field(default_factory=lambda: [0, 0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0, 0])


class PromptTexts:
    """The texts of an engine, by prompt. ``totals``: counts what is dropped here."""

    def __init__(self, indexes: SuffixIndexes, spec: TextSpec, totals: DraftTotals) -> None:
        self.indexes, self.spec, self.totals = indexes, spec, totals
        self._newest_weight = 1 << (spec.max_history - 1)
        self.exchange: TextExchange | None = None
        """Exchange with other engines, on the first rank of those with one schedule"""
        self.prompts: OrderedDict[bytes, PromptText] = OrderedDict()
        """Texts by a digest of the prompt, the one used last at the end"""
        self.live: dict[str, PromptText | None] = {}
        """Requests in the engine; None: its prompt was dropped, it is not read any more"""
        self._grown: dict[bytes, None] = {}
        """Prompts whose text has grown by more than `UNCHECKED_TOKENS` since its bytes were counted"""
        self._restored: dict[bytes, History] = {}
        """History that was loaded, of prompts that have had no request since, those used longest ago first"""
        self._restored_version: int | None = None
        """The first policy since then"""
        self.version = 0
        self._num_tokens = 0
        """Number of tokens of the texts and histories of all prompts"""

    @property
    def nbytes(self) -> int:
        """Bytes of the indexes, and of the texts beside them."""
        return self.indexes.nbytes + self._num_tokens * array("i").itemsize

    @property
    def _client(self) -> TextClient | None:
        """What the exchange sends, while there is one."""
        return None if self.exchange is None else self.exchange.client

    # Reading

    def read(self, sequences: Items[Sequence]) -> list[tuple[int, PromptText]]:
        """Read the new tokens of sequences that run; return the number and the prompt of each that is read."""
        return [(i, prompt) for i, seq in enumerate(sequences) if (prompt := self._read(seq)) is not None]

    def end(self, seq: Sequence) -> None:
        """Read the last tokens of a sequence that leaves the engine, unless it never ran."""
        request = seq.request.id
        if request not in self.live and len(seq.tokens) == seq.first_token + len(seq.request.response):
            return
        self._read(seq)
        prompt = self.live.pop(request)
        if prompt is not None:
            prompt.live.discard(request)

    def read_piece(self, piece: TextPiece) -> int:
        """Add what another engine has generated to the texts of its prompt; return the number of tokens added."""
        prompt = self.prompts.get(piece.prompt)
        if prompt is None or piece.request in prompt.live:
            return 0
        is_sibling = piece.group in prompt.groups
        if not (is_sibling or self.spec.history):
            return 0
        texts = prompt.texts if is_sibling else prompt.past.setdefault(piece.group, {})
        text = texts.get(piece.request, array("i"))
        known = text[piece.start : piece.end]
        if piece.start > len(text) or (piece.start and known != piece.tokens[: len(known)]):
            return 0
        if piece.request not in texts or known != piece.tokens[: len(known)]:  # new, or generated again
            self._open(prompt, texts, piece.request)
            known = array("i")
        self._append(prompt, texts[piece.request], piece.request, piece.tokens[len(known) :])
        return len(piece.tokens) - len(known)

    def _read(self, seq: Sequence) -> PromptText | None:
        request = seq.request.id
        if request not in self.live:
            self._begin(seq)
        prompt = self.live[request]
        if prompt is None:
            return None
        text = prompt.texts[request]
        known = seq.first_token + len(text)
        if known < len(seq.tokens):
            self._append(prompt, text, request, array("i", seq.tokens[known:]))
            if (client := self._client) is not None:
                client.note(prompt.key, seq.request.group, request, text, len(seq.request.response))
        return prompt

    def _begin(self, seq: Sequence) -> None:
        """Add a request to the texts of its prompt: behind its text, if its response continues that."""
        request = seq.request
        key = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=16).digest()
        prompt = self.prompts.get(key)
        if prompt is not None and prompt.live:
            prompt.join(request.group)
        text = None if prompt is None else prompt.texts.get(request.id)
        continues = text is not None and list(text) == seq.tokens[seq.first_token : seq.first_token + len(text)]
        is_new = request.group not in prompt.groups or (text and not continues) if prompt is not None else True
        if prompt is None or (is_new and not prompt.live):
            prompt, continues = self._begin_group(key, request, last=prompt), False
        if not continues:
            self._open(prompt, prompt.texts, request.id)
        prompt.live.add(request.id)
        prompt.version = self.version
        self.live[request.id] = prompt
        self.prompts.move_to_end(key)

    def _begin_group(self, key: bytes, request: Request, last: PromptText | None) -> PromptText:
        """Begin the texts of a prompt for another group, with the responses of the last one as history."""
        history: History = []
        begun: dict[str, array[int]] = {}
        if last is None:
            history = self._drop_restored(key)
        else:
            begun = last.past.get(request.group, {})
            if self.spec.history:  # a group without text, because it was aborted, leaves the history as it is
                history = last.next_history(self.spec.max_history, request.group)
            self._drop(last)
            if (client := self._client) is not None:
                client.end_group(key)
        history = rewarded(history, request.last_rewards)
        tokens = array("i", request.prompt[-MAX_PROMPT:])
        prompt = self.prompts[key] = PromptText(key, self.version, tokens, history, restored=last is None)
        prompt.join(request.group)
        self._count(prompt, prompt.num_tokens)
        for name, text in begun.items():
            self._open(prompt, prompt.texts, name)
            self._append(prompt, prompt.texts[name], name, text)
        return prompt

    def _open(self, prompt: PromptText, texts: dict[str, array[int]], request: str) -> None:
        """Begin a response, ``texts``: those of its group; a request that is generated again has no other."""
        self._num_tokens -= len(texts.get(request, ()))
        texts[request] = array("i")
        prompt.numbers.pop(request, None)
        prompt.indexed[request] = 0
        prompt.stale[request] = None

    def _append(self, prompt: PromptText, text: array[int], request: str, tokens: array[int]) -> None:
        text.extend(tokens)
        prompt.stale[request] = None
        self._count(prompt, len(tokens))

    def _count(self, prompt: PromptText, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        prompt.unchecked += num_tokens
        if prompt.unchecked > UNCHECKED_TOKENS:
            self._grown[prompt.key] = None

    # Indexes

    def index(self, sequences: Items[tuple[str, PromptText]]) -> list[Place]:
        """Bring the indexes of prompts up to date; return the places of these requests in them."""
        places: list[Place] = []
        texts: list[array[int]] = []
        for prompt in {prompt.key: prompt for _, prompt in sequences if prompt.stale}.values():
            index = self._index_of(prompt)
            for request in prompt.stale:
                text, is_sibling = prompt.text_of(request)
                if request not in prompt.numbers:
                    source = SIBLING if is_sibling else HISTORY
                    weight = NEUTRAL * self._newest_weight if source == HISTORY or self.spec.siblings else 0
                    prompt.numbers[request] = self.indexes.open(index, source, weight)
                if new := text[prompt.indexed[request] :]:
                    places.append((index, prompt.numbers[request]))
                    texts.append(new)
                    prompt.indexed[request] = len(text)
            prompt.stale.clear()
        if places:
            self.indexes.extend(places, texts)
        return [(self._index_of(prompt), prompt.numbers[request]) for request, prompt in sequences]

    def _index_of(self, prompt: PromptText) -> int:
        """Return the index of a prompt; create it with the prompt's history, unless there is one."""
        if prompt.index is not None:
            return prompt.index
        index = prompt.index = self.indexes.new(prompt.tokens, MIN_MATCH, MAX_MATCH)
        self._num_tokens -= len(prompt.tokens)
        prompt.tokens = array("i")
        for age, responses in enumerate(prompt.history):
            weights = weights_of([response.reward for response in responses])
            weights = [weight * (self._newest_weight >> age) for weight in weights]
            opened = [self.indexes.open(index, HISTORY, weight, is_new=prompt.restored) for weight in weights]
            self.indexes.extend([(index, number) for number in opened], [response.tokens for response in responses])
        return index

    # Checkpoints

    def history(self, max_tokens: int) -> list[TextPiece]:
        """Return what the next group of each prompt would have as history, last used first, for `load_history`."""
        groups_by_prompt = list(self._restored.items())
        groups_by_prompt += [(key, prompt.next_history(self.spec.max_history)) for key, prompt in self.prompts.items()]
        pieces: list[TextPiece] = []
        for key, groups in reversed(groups_by_prompt if self.spec.history else []):
            texts = [(str(age), response) for age, responses in enumerate(groups) for response in responses]
            max_tokens -= sum(len(one.tokens) for _, one in texts)
            if max_tokens < 0:
                break
            pieces += [TextPiece(key, age, one.request, 0, one.tokens[:], one.reward) for age, one in texts]
        return pieces

    def load_history(self, pieces: Items[TextPiece]) -> None:
        """Load what `history` has returned, before anything else was read."""
        self._restored_version = None
        ages = {str(age): age for age in range(self.spec.max_history)} | {"": 0}
        for piece in reversed(pieces) if self.spec.history else ():
            age = ages.get(piece.group)
            if age is None:  # saved by a run that kept more
                continue
            groups = self._restored.setdefault(piece.prompt, [])
            groups += [[] for _ in range(age + 1 - len(groups))]
            groups[age].insert(0, PastResponse(piece.request, piece.tokens, piece.reward))
            self._num_tokens += len(piece.tokens)

    # Dropping

    def adopt(self, version: int) -> None:
        """Record the policy version of the engine, and drop prompts that were not used for too long."""
        self.version = version
        if self._restored_version is None:
            self._restored_version = version
        if self.spec.max_age is None:
            return
        oldest = version - self.spec.max_age
        expired = [prompt for prompt in self.prompts.values() if prompt.version < oldest and not prompt.live]
        for prompt in expired:
            self._forget(prompt)
        self.totals.expired += len(expired)
        for key in [*self._restored] if self._restored_version < oldest else ():
            self._drop_restored(key)
            self.totals.expired += 1

    def drop_oldest(self) -> None:
        """Drop prompts until what is kept has room."""
        for key in self._grown:
            prompt = self.prompts.get(key)
            if prompt is None:
                continue
            prompt.unchecked = 0
            index_bytes = 0 if prompt.index is None else self.indexes.nbytes_of(prompt.index)
            if index_bytes + prompt.num_tokens * array("i").itemsize > self.spec.max_group_bytes:
                self._drop_running(prompt)
        self._grown.clear()
        while self.nbytes > self.spec.max_bytes and self._restored:
            self._drop_restored(next(iter(self._restored)))
            self.totals.dropped += 1
        while self.nbytes > self.spec.max_bytes and self.prompts:
            prompts = self.prompts.values()
            self._drop_running(next((prompt for prompt in prompts if not prompt.live), None) or next(iter(prompts)))

    def _drop_running(self, prompt: PromptText) -> None:
        """Drop a prompt for which there is no room; its running requests are not drafted for any more."""
        for request in prompt.live:
            self.live[request] = None
        self._forget(prompt)
        self.totals.dropped += 1

    def _drop_restored(self, key: bytes) -> History:
        groups = self._restored.pop(key, [])
        self._num_tokens -= sum(len(response.tokens) for responses in groups for response in responses)
        return groups

    def _forget(self, prompt: PromptText) -> None:
        """Drop a prompt; what other engines have is asked for again if a request of it comes."""
        self._drop(prompt)
        if (client := self._client) is not None:
            client.forget(prompt.key)

    def _drop(self, prompt: PromptText) -> None:
        if prompt.index is not None:
            self.indexes.remove(prompt.index)
        self._num_tokens -= prompt.num_tokens
        del self.prompts[prompt.key]
