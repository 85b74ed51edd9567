"""The file format of a segment: the columns of one put, each buffer bare and aligned. No pickle.

    | stamp | table bytes | table (JSON) | lengths, buffer | lengths, buffer | …

The file of a segment whose samples have all ended is reused, so a reader may find another segment in it than it was
sent to. The stamp is the number of the segment that the file holds, 0 while one is being written. A reader checks it
before and after it copies; if it is not the expected number, it asks the queue again where its samples lie.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distqueue.durable import sync
from distqueue.layout import Layout
from distqueue.messages import index_of_lengths, smallest
from distqueue.payload.copying import copy_all

ALIGN = 64
HEAD = 16


class SegmentGone(LookupError):
    """The file does not hold this segment, or no longer."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """A column's bytes in place: an element is a position along the sequence, or a row of a dense column."""

    layout: Layout
    data: np.ndarray
    """(elements * layout.element_bytes,) uint8"""
    offsets: np.ndarray | None
    """(B + 1,) int64, in elements; None: dense"""


class SegmentFile:
    """A mapped file that holds one segment. With `size` it is created or grown to it, and writable."""

    def __init__(self, path: str | Path, size: int | None = None) -> None:
        self.path, self.writable = str(path), size is not None
        flags = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY
        try:
            handle = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise SegmentGone(self.path) from None
        try:
            if size is not None and os.fstat(handle).st_size < size:
                os.ftruncate(handle, size)
            self.size = os.fstat(handle).st_size
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            self.bytes = np.frombuffer(mmap.mmap(handle, self.size, prot=access), np.uint8)
        except ValueError:  # empty: its writer has not set its size yet
            raise SegmentGone(self.path) from None
        finally:
            os.close(handle)
        self._words = self.bytes[:HEAD].view(np.int64)
        self._parsed: tuple[int, dict[str, Stretch]] = (0, {})

    def write(self, number: int, contents: Contents) -> None:
        """Write the contents as segment `number`."""
        table = np.frombuffer(contents.table, np.uint8)
        self._words[0] = 0
        self._words[1] = len(table)
        copy_all([(self.bytes[at : at + piece.nbytes], piece) for at, piece in ((HEAD, table), *contents.pieces)])
        self._words[0] = number

    def copy_from(self, contents: np.ndarray) -> None:
        """Write the segment that another file holds."""
        np.copyto(self.bytes[HEAD : len(contents)], contents[HEAD:])
        np.copyto(self.bytes[:HEAD], contents[:HEAD])

    def holds(self, number: int) -> bool:
        return bool(self._words[0] == number)

    def columns(self, number: int) -> dict[str, Stretch]:
        """Views of the columns of segment `number`; call `check` after use. SegmentGone: the file holds another."""
        self.check(number)
        if self._parsed[0] != number:
            self._parsed = number, self._parse()
        return self._parsed[1]

    def check(self, number: int) -> None:
        """SegmentGone: the file was overwritten since it held `number`."""
        if not self.holds(number):
            raise SegmentGone(f"{self.path} holds segment {self._words[0]}, not {number}")

    def sync(self) -> None:
        """Wait until the file and its name are on disk."""
        sync(self.path)
        sync(os.path.dirname(self.path))

    def _parse(self) -> dict[str, Stretch]:
        try:
            return self._stretches(json.loads(self.bytes[HEAD : HEAD + int(self._words[1])].tobytes()))
        except (ValueError, IndexError):  # overwritten while it was read
            raise SegmentGone(self.path) from None

    def _stretches(self, entries: list) -> dict[str, Stretch]:
        stretches = {}
        offsets_at: dict[int, np.ndarray] = {}
        for name, *layout, (at, nbytes), lengths in entries:
            if lengths is not None and lengths[0] not in offsets_at:
                start, width, count = lengths
                lengths_B = self.bytes[start : start + np.dtype(width).itemsize * count].view(width)
                offsets_at[start] = np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)])
            offsets = None if lengths is None else offsets_at[lengths[0]]
            stretches[name] = Stretch(Layout.from_fields(name, layout), self.bytes[at : at + nbytes], offsets)
        return stretches


class Contents(NamedTuple):
    """Columns laid out as a segment: its table, and where each buffer goes."""

    table: bytes
    pieces: list[tuple[int, np.ndarray]]
    """(position, uint8)"""
    nbytes: int
    """Bytes of the segment, alignment included"""

    @property
    def sent_bytes(self) -> int:
        """Bytes written, alignment excluded."""
        return HEAD + len(self.table) + sum(piece.nbytes for _, piece in self.pieces)


def lay_out(columns: Mapping[str, Stretch]) -> Contents:
    """Lay columns out as a segment; equal lengths of several columns are stored once."""
    distinct: list[np.ndarray] = []
    lengths_of: dict[str, int] = {}
    for name, column in columns.items():
        if column.offsets is not None:
            index = index_of_lengths(smallest(np.diff(column.offsets)), distinct)
            assert index is not None
            lengths_of[name] = index
    table = b""
    while True:  # positions depend on the length of the table that lists them
        at = HEAD + len(table)
        pieces: list[tuple[int, np.ndarray]] = []
        for piece in (*distinct, *(column.data for column in columns.values())):
            at += -at % ALIGN
            pieces.append((at, piece.view(np.uint8)))
            at += piece.nbytes
        entries = []
        for (name, column), (start, piece) in zip(columns.items(), pieces[len(distinct) :], strict=True):
            where = None
            if name in lengths_of:
                lengths = distinct[lengths_of[name]]
                where = (pieces[lengths_of[name]][0], lengths.dtype.str, len(lengths))
            entries.append((name, *column.layout.fields, (start, piece.nbytes), where))
        encoded = json.dumps(entries, separators=(",", ":")).encode()
        if len(encoded) <= len(table):
            return Contents(encoded.ljust(len(table)), pieces, at)
        table = encoded.ljust(len(encoded) + 16)
