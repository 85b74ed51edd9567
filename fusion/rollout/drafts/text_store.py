"""Keep the responses of all engines by prompt, and return to each engine what others have added since it last asked.

    engine 0 ─ pieces it has generated ─► texts of each prompt, ─ pieces that others have ─► engine 1
               (request, position)        and the writer of each   written behind a cursor

Pure: no clock, no process. Invariants (property-tested):

1. An engine that applies the pieces of all replies, in order, has all texts of the prompts that it asks for, but for
   what it has written itself, whatever is repeated or lost on the way. What is generated again, with other tokens,
   replaces what it was, provided that its beginning arrives first.
2. A piece that does not join what is here is not stored; the reply names the length from which its writer continues.
3. Texts take at most `max_bytes`; prompts used longest ago are dropped first. Of a prompt the last `max_groups` groups
   are kept. A prompt that was not used for more than `max_age` policy versions is dropped."""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fusion.rollout.drafts.pieces import TextPiece

TEXT_BYTES, MARK_BYTES = 500, 150
"""Bytes that a text takes besides its tokens, and each of its marks, about"""
MAX_MARKS = 32
"""Maximum of a text; then about every second mark is dropped: readers may get up to half of the text once more"""
MAX_REPLY_TOKENS = 1 << 20
"""Tokens after which further prompts wait for the next reply"""


class Mark(NamedTuple):
    """The text up to ``length`` was written by ``writer`` as update ``number`` of the store."""

    number: int
    length: int
    writer: int


@dataclass
class _Text:
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    marks: list[Mark] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return TEXT_BYTES + MARK_BYTES * len(self.marks) + len(self.tokens) * self.tokens.itemsize

    def cut(self, length: int) -> None:
        """Drop what is behind ``length`` tokens."""
        del self.tokens[length:]
        self.marks = [mark for mark in self.marks if mark.length <= length]

    def extend(self, tokens: "array[int]", number: int, writer: int) -> None:
        """Append tokens, by ``writer`` as update ``number``."""
        self.tokens.extend(tokens)
        self.marks.append(Mark(number, len(self.tokens), writer))
        if len(self.marks) > MAX_MARKS:
            self.marks = _thinned(self.marks)


@dataclass
class _Prompt:
    """``groups``: group → request → text, the group begun last at the end; ``version``: policy when it was used."""

    groups: OrderedDict[str, dict[str, _Text]] = field(default_factory=OrderedDict)
    version: int = 0


@dataclass
class StoreTotals:
    """Since construction. ``dropped``: prompts that found no room; ``expired``: unused for too long."""

    received_tokens: int = 0
    sent_tokens: int = 0
    dropped: int = 0
    expired: int = 0


@dataclass(frozen=True)
class TextReply:
    """``cursors``: from where to ask next, of the prompts that were asked for; ``behind``: number of tokens that are
    stored of each request whose piece did not join them."""

    pieces: list[TextPiece]
    cursors: dict[bytes, int]
    behind: dict[str, int]


class TextStore:
    """The texts of a run. ``max_groups``: of a prompt, those before the last one as history; ``max_age``: policy
    versions after which a prompt that is not used is dropped; None: never."""

    def __init__(self, max_bytes: int, max_groups: int = 2, max_age: int | None = None) -> None:
        self._max_bytes, self._max_groups, self._max_age = max_bytes, max_groups, max_age
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        """The one used last at the end"""
        self._number = 0
        """Number of the last update"""
        self._version = 0
        self.nbytes = 0
        self.totals = StoreTotals()

    def exchange(
        self, writer: int, version: int, cursors: Mapping[bytes, int], pieces: Sequence[TextPiece]
    ) -> TextReply:
        """Store what ``writer`` has generated, and return what others have. ``version``: the writer's policy version;
        ``cursors``: by prompt that it drafts for, of its last reply; 0: none."""
        self._version = max(self._version, version)
        behind: dict[str, int] = {}
        self._number += 1
        for piece in pieces:
            have = self._write(writer, piece)
            if have is not None:
                behind[piece.request] = have
        unread: list[TextPiece] = []
        reached: dict[bytes, int] = {}
        num_tokens = 0
        for key, cursor in cursors.items():
            if num_tokens > MAX_REPLY_TOKENS:
                break
            new = list(self._written_since(key, cursor, writer))
            num_tokens += sum(len(piece.tokens) for piece in new)
            unread += new
            reached[key] = self._number
        self.totals.sent_tokens += num_tokens
        self._drop()
        return TextReply(unread, reached, behind)

    def _write(self, writer: int, piece: TextPiece) -> int | None:
        """Store a piece; return the length of the stored text if the piece does not join it."""
        if not piece.tokens:
            return None
        prompt = self._prompts.get(piece.prompt)
        text = None if prompt is None else prompt.groups.get(piece.group, {}).get(piece.request)
        have = 0 if text is None else len(text.tokens)
        if piece.start > have:
            return have
        self._use(piece.prompt)
        text = text or self._begin(piece)
        self.nbytes -= text.nbytes
        known = text.tokens[piece.start : piece.end]
        if known != piece.tokens[: len(known)]:  # generated again, with other tokens
            text.cut(piece.start)
            known = known[:0]
        if new := piece.tokens[len(known) :]:
            text.extend(new, self._number, writer)
            self.totals.received_tokens += len(new)
        self.nbytes += text.nbytes
        return None

    def _begin(self, piece: TextPiece) -> _Text:
        groups = self._prompts[piece.prompt].groups
        if piece.group not in groups:
            groups[piece.group] = {}
            while len(groups) > self._max_groups:
                _, texts = groups.popitem(last=False)
                self.nbytes -= sum(text.nbytes for text in texts.values())
        text = groups[piece.group][piece.request] = _Text()
        self.nbytes += text.nbytes
        return text

    def _written_since(self, key: bytes, cursor: int, reader: int) -> Iterator[TextPiece]:
        prompt = self._prompts.get(key)
        if prompt is None:
            return
        self._use(key)
        for group, texts in prompt.groups.items():
            for request, text in texts.items():
                first = bisect_right(text.marks, cursor, key=lambda mark: mark.number)
                start = text.marks[first - 1].length if first else 0
                for number, mark in enumerate(text.marks[first:], first):
                    is_last = number + 1 == len(text.marks) or text.marks[number + 1].writer != mark.writer
                    if is_last:
                        if mark.writer != reader:
                            yield TextPiece(key, group, request, start, text.tokens[start : mark.length])
                        start = mark.length

    def _use(self, key: bytes) -> None:
        self._prompts.setdefault(key, _Prompt()).version = self._version
        self._prompts.move_to_end(key)

    def _drop(self) -> None:
        while self._prompts:
            key, oldest = next(iter(self._prompts.items()))
            expired = self._max_age is not None and self._version - oldest.version > self._max_age
            if not expired and self.nbytes <= self._max_bytes:
                return
            self.totals.expired += expired
            self.totals.dropped += not expired
            del self._prompts[key]
            self.nbytes -= sum(text.nbytes for texts in oldest.groups.values() for text in texts.values())


def _thinned(marks: list[Mark]) -> list[Mark]:
    """Drop every second mark that is followed by one of the same writer: a reader between the two gets more."""
    return [
        mark
        for number, mark in enumerate(marks)
        if number % 2 or number + 1 == len(marks) or marks[number + 1].writer != mark.writer
    ]
