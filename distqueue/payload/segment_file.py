"""A segment: the columns of one put in one stretch of shared memory, each buffer bare and aligned. No pickle.

    | stamp | table bytes | table (JSON) | lengths, buffer | lengths, buffer | …

The file of a segment none of whose samples is wanted any more is written again, so a reader may find another segment
in it than the one it was sent to. The stamp tells: the number of the segment that the file holds, 0 while one is being
written. A reader looks at it before it copies and after; where it is not the number it was told, it asks anew where its
samples lie.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from distqueue.column import Column, Layout
from distqueue.durable import sync
from distqueue.messages import layout_fields, layout_of, smallest
from distqueue.packed import PackedBatch
from distqueue.payload.copying import copy_all

ALIGN = 64
HEAD = 16


class SegmentGone(LookupError):
    """The file does not hold this segment (any more)."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """A column as bytes where they lie: an element is a position along the sequence, or a row of a dense column."""

    layout: Layout
    data: np.ndarray
    """(elements * element_bytes,) uint8"""
    offsets: np.ndarray | None
    """(B + 1,) int64, in elements; None: dense"""

    @property
    def element_bytes(self) -> int:
        return self.layout.dtype.itemsize * prod(self.layout.trailing)

    @classmethod
    def of(cls, column: Column) -> Stretch:
        offsets = None if column.offsets is None else column.offsets.numpy()
        return cls(column.layout, bare_bytes(column), offsets)


def bare_bytes(column: Column) -> np.ndarray:
    """(bytes,) uint8: a view of the column's buffer."""
    if not column.buffer.numel():
        return np.empty(0, np.uint8)
    return column.buffer.reshape(-1).view(torch.uint8).numpy()


class SegmentFile:
    """A file of segments, mapped. With `size` it is made, or grown to it, and may be written."""

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
        except ValueError:  # empty: its writer has not come to its size yet
            raise SegmentGone(self.path) from None
        finally:
            os.close(handle)
        self._words = self.bytes[:HEAD].view(np.int64)
        self._parsed: tuple[int, dict[str, Stretch]] = (0, {})

    def write(self, number: int, contents: Contents) -> None:
        """Makes this the segment `number`, with a copy of the contents."""
        table = np.frombuffer(contents.table, np.uint8)
        self._words[0] = 0
        self._words[1] = len(table)
        copy_all([(self.bytes[at : at + piece.nbytes], piece) for at, piece in ((HEAD, table), *contents.pieces)])
        self._words[0] = number

    def copy_from(self, contents: np.ndarray) -> None:
        """Makes this the segment that another file holds."""
        np.copyto(self.bytes[HEAD : len(contents)], contents[HEAD:])
        np.copyto(self.bytes[:HEAD], contents[:HEAD])

    def holds(self, number: int) -> bool:
        return bool(self._words[0] == number)

    def columns(self, number: int) -> dict[str, Stretch]:
        """Views of segment `number`; `check` when done with them. SegmentGone if the file holds another."""
        self.check(number)
        if self._parsed[0] != number:
            self._parsed = number, self._parse()
        return self._parsed[1]

    def check(self, number: int) -> None:
        """SegmentGone if the file was written again since it held `number`."""
        if not self.holds(number):
            raise SegmentGone(f"{self.path} holds segment {self._words[0]}, not {number}")

    def sync(self) -> None:
        """Returns when the file is on disk, with its name."""
        sync(self.path)
        sync(os.path.dirname(self.path))

    def _parse(self) -> dict[str, Stretch]:
        try:
            return self._stretches(json.loads(self.bytes[HEAD : HEAD + int(self._words[1])].tobytes()))
        except (ValueError, IndexError):  # written again while it was read
            raise SegmentGone(self.path) from None

    def _stretches(self, entries: list) -> dict[str, Stretch]:
        stretches = {}
        offsets_at: dict[int, np.ndarray] = {}
        for name, kind, dtype, trailing, ragged, (at, nbytes), lengths in entries:
            if ragged and lengths[0] not in offsets_at:
                start, width, count = lengths
                lengths_B = self.bytes[start : start + np.dtype(width).itemsize * count].view(width)
                offsets_at[start] = np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)])
            offsets = offsets_at[lengths[0]] if ragged else None
            stretches[name] = Stretch(layout_of(kind, dtype, trailing, ragged), self.bytes[at : at + nbytes], offsets)
        return stretches


class Contents(NamedTuple):
    """Columns laid out as a segment."""

    table: bytes
    pieces: list[tuple[int, np.ndarray]]
    """(position, uint8)"""
    nbytes: int
    """Of it all, alignment included"""

    @property
    def sent_bytes(self) -> int:
        """What is really written."""
        return HEAD + len(self.table) + sum(piece.nbytes for _, piece in self.pieces)


def lay_out(columns: Mapping[str, Stretch]) -> Contents:
    """Columns of equal lengths share them."""
    distinct: list[np.ndarray] = []
    lengths_of: dict[str, int] = {}
    for name, column in columns.items():
        if column.offsets is not None:
            lengths = smallest(np.diff(column.offsets))
            same = [i for i, known in enumerate(distinct) if np.array_equal(known, lengths)]
            lengths_of[name] = same[0] if same else len(distinct)
            if not same:
                distinct.append(lengths)
    table = b""
    while True:  # positions depend on the length of the table that tells them
        at = HEAD + len(table)
        pieces: list[tuple[int, np.ndarray]] = []
        for piece in (*distinct, *(column.data for column in columns.values())):
            at += -at % ALIGN
            pieces.append((at, piece.view(np.uint8)))
            at += piece.nbytes
        entries = []
        for (name, column), (start, piece) in zip(columns.items(), pieces[len(distinct) :], strict=True):
            told = None
            if name in lengths_of:
                lengths = distinct[lengths_of[name]]
                told = (pieces[lengths_of[name]][0], lengths.dtype.str, len(lengths))
            entries.append((name, *layout_fields(column.layout), (start, piece.nbytes), told))
        found = json.dumps(entries, separators=(",", ":")).encode()
        if len(found) <= len(table):
            return Contents(found.ljust(len(table)), pieces, at)
        table = found.ljust(len(found) + 16)


def stretches_of(batch: PackedBatch) -> dict[str, Stretch]:
    """The batch's columns where they lie."""
    return {name: Stretch.of(column) for name, column in batch.columns.items()}
