"""The file format of a segment: the columns of one put, each buffer bare and aligned. No pickle.

    | stamp | sum | table's end | table bytes | table (JSON) | checksums | lengths | … | buffer | buffer | …
                  └──────────────── covered by `sum` ────────────────────────────────┘ └ covered by the checksums ┘

The file of a segment whose samples have all ended is reused, so a reader may find another segment in it than it was
sent to. The stamp is the number of the segment that the file holds, 0 while one is being written. A reader checks it
before and after it copies; if it is not the expected number, it asks the queue again where its samples lie.

`sum` is the checksum of the table, seeded with the number, and verified when a file is mapped; `checksums.py` describes
those of the columns, which `gather.py` verifies. A difference is damage only if the stamp is still the expected one.

The space of a file is reserved when it is created or grown: a full disk or shared memory is an error there, whereas a
write to a mapped page without space behind it would kill the process (SIGBUS)."""

import json
import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from distqueue.durable import sync
from distqueue.errors import naming_full_storage
from distqueue.layout import ColumnLayout
from distqueue.messages import File, SegmentPlace, index_of_lengths, offsets_of, smallest, to_json
from distqueue.payload.buffers import ALIGN, copy_all
from distqueue.payload.checksums import Blocks, sums_of

HEAD = 32
COVERED = 16
"""Position from which `sum` covers the file, up to the table's end"""
FORMAT = 2
"""Version of the format; 1 had no checksums"""
MAX_MAPPED = 256
"""Files a process keeps mapped"""


class SegmentGone(LookupError):
    """The file does not hold this segment, or no longer."""


class SegmentDamaged(RuntimeError):
    """Bytes of segments differ from their checksums. `numbers`: of the segments."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"segments {list(numbers)}: their checksums differ")
        self.numbers = tuple(numbers)

    def __reduce__(self) -> "tuple[type[SegmentDamaged], tuple[tuple[int, ...]]]":
        return SegmentDamaged, (self.numbers,)


class DamagedRows(NamedTuple):
    """Samples first to last - 1 of a segment, of which a column is damaged; column "": the table."""

    column: str
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Stretch:
    """A column's bytes in place: an element is a position along the sequence, or a row of a dense column."""

    layout: ColumnLayout
    data: np.ndarray
    """(elements * layout.element_bytes,) uint8"""
    offsets: np.ndarray | None
    """(B + 1,) int64, in elements; None: dense"""
    blocks: Blocks | None = None
    """The blocks that have a checksum; None: the bytes are in no segment"""
    sums: np.ndarray | None = None
    """(K,) uint64: the checksums of the blocks"""


class SegmentFile:
    """A mapped file that holds one segment. With `size` it is created or grown to it, and writable."""

    def __init__(self, path: str | Path, size: int | None = None) -> None:
        self.path, self.writable = str(path), size is not None
        flags = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY
        try:
            handle = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise SegmentGone(self.path) from None
        try:
            if size is not None and (held := os.fstat(handle).st_size) < size:
                self._reserve(handle, held, size)
            self.size = os.fstat(handle).st_size
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            self.bytes = np.frombuffer(mmap.mmap(handle, self.size, prot=access), np.uint8)
        except ValueError:  # empty: its writer has not set its size yet
            raise SegmentGone(self.path) from None
        finally:
            os.close(handle)
        if self.size < HEAD:
            raise SegmentGone(self.path)
        self._words = self.bytes[:HEAD].view(np.int64)
        self._parsed: tuple[int, dict[str, Stretch]] = (0, {})

    def write(self, number: int, contents: "Contents") -> None:
        table = np.frombuffer(contents.table, np.uint8)
        self._words[0] = 0
        copy_all([(self.bytes[at : at + piece.nbytes], piece) for at, piece in ((COVERED, table), *contents.pieces)])
        self._words[1:2].view(np.uint64)[0] = checksum(contents.table, seed=number)
        self._words[0] = number

    def copy_from(self, contents: np.ndarray) -> None:
        """Write the segment that another file holds."""
        np.copyto(self.bytes[HEAD : len(contents)], contents[HEAD:])
        np.copyto(self.bytes[:HEAD], contents[:HEAD])

    def holds(self, number: int) -> bool:
        return bool(self._words[0] == number)

    def columns(self, number: int) -> dict[str, Stretch]:
        """Views of the columns of segment `number`; call `check` after use. SegmentGone: the file holds another.
        SegmentDamaged: its table is damaged."""
        self.check(number)
        if self._parsed[0] != number:
            parsed = self._parse(number)
            self.check(number)
            if parsed is None:
                raise SegmentDamaged([number])
            self._parsed = number, parsed
        return self._parsed[1]

    def check(self, number: int) -> None:
        """SegmentGone: the file was overwritten since it held `number`."""
        if not self.holds(number):
            raise SegmentGone(f"{self.path} holds segment {self._words[0]}, not {number}")

    def damaged(self, number: int) -> list[DamagedRows]:
        """Verify all of segment `number`. SegmentGone: the file holds another."""
        try:
            columns = self.columns(number)
        except SegmentDamaged:
            return [DamagedRows("", 0, -1)]
        ranges = []
        for name, column in columns.items():
            assert column.blocks is not None and column.sums is not None
            wrong = np.flatnonzero(sums_of([(column.data, column.blocks)]) != column.sums)
            rows = column.blocks.rows.tolist()
            ranges += [DamagedRows(name, rows[k], rows[k + 1]) for k in wrong.tolist()]
        self.check(number)
        return ranges

    def sync(self) -> None:
        """Wait until the file and its name are on disk. SegmentGone: a queue that has restarted removed it as one that
        nobody had committed."""
        try:
            sync(self.path)
        except FileNotFoundError:
            raise SegmentGone(self.path) from None
        sync(os.path.dirname(self.path))

    def _reserve(self, handle: int, held: int, size: int) -> None:
        """Grow the file from `held` to `size` bytes that exist. StorageFull: there is no space."""
        try:
            with naming_full_storage(self.path, size):
                os.posix_fallocate(handle, 0, size)
        except BaseException:
            os.ftruncate(handle, held)
            if not held:
                os.unlink(self.path)
            raise

    def _parse(self, number: int) -> dict[str, Stretch] | None:
        """Read the table. None: it is damaged, or was overwritten while it was read."""
        end, table_bytes = self._words[2:4].tolist()
        if not HEAD <= HEAD + table_bytes <= end <= self.size:
            return None
        covered = self.bytes[COVERED:end].tobytes()  # what is parsed is what was verified
        if checksum(covered, seed=number) != int(self._words[1:2].view(np.uint64)[0]):
            return None
        about = json.loads(covered[HEAD - COVERED : HEAD - COVERED + table_bytes])
        if about["format"] != FORMAT:
            raise ValueError(f"{self.path}: a segment of format {about['format']}; this version reads {FORMAT}")
        return self._stretches(about, np.frombuffer(covered, np.uint8))

    def _stretches(self, about: dict, covered: np.ndarray) -> dict[str, Stretch] | None:
        stretches = {}
        offsets_at: dict[int, np.ndarray] = {}
        at, count = about["sums"]
        sums, used = covered[at - COVERED : at - COVERED + 8 * count].view(np.uint64), 0
        for name, *layout, (at, nbytes), lengths in about["columns"]:
            if at + nbytes > self.size:
                return None
            if lengths is not None and lengths[0] not in offsets_at:
                start, width, count = lengths
                lengths_B = covered[start - COVERED :][: np.dtype(width).itemsize * count].view(width)
                offsets_at[start] = offsets_of(lengths_B)
            offsets = None if lengths is None else offsets_at[lengths[0]]
            of_column = ColumnLayout.from_fields(name, layout)
            blocks = Blocks.of(of_column, nbytes, offsets)
            data = self.bytes[at : at + nbytes]
            stretches[name] = Stretch(of_column, data, offsets, blocks, sums[used : used + len(blocks)])
            used += len(blocks)
        return stretches


class Mapped:
    """The MAX_MAPPED most recently used segment files of a process: a shard, or a client that reads and writes the
    files of its own node. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, SegmentFile] = {}
        self._lock = threading.Lock()

    def columns(self, place: SegmentPlace) -> dict[str, Stretch]:
        """Views of a segment's columns. SegmentGone: the file holds another segment now, or does not exist."""
        return self._file(place).columns(place.number)

    def check(self, places: Iterable[SegmentPlace]) -> None:
        """SegmentGone: one of the segments was overwritten since it was mapped."""
        for place in places:
            self._file(place).check(place.number)

    def write(self, file: File, contents: "Contents") -> None:
        """Write a put to its file, which is created if it does not exist; if that is durable, until it is on disk."""
        mapped = self._files.get(file.path)
        if mapped is None or not mapped.writable or mapped.size < file.size:
            mapped = SegmentFile(file.path, file.size)
        self._keep(mapped).write(file.number, contents)
        if file.durable:
            mapped.sync()

    def _file(self, place: SegmentPlace) -> SegmentFile:
        file = self._files.get(place.path)
        if file is None or not file.holds(place.number):  # not mapped yet, or mapped when it was smaller
            file = SegmentFile(place.path)
        return self._keep(file)

    def _keep(self, file: SegmentFile) -> SegmentFile:
        with self._lock:
            self._files.pop(file.path, None)
            self._files[file.path] = file
            while len(self._files) > MAX_MAPPED:
                del self._files[next(iter(self._files))]
        return file


class Contents(NamedTuple):
    """Columns laid out as a segment."""

    table: bytes
    """Header from COVERED to the table's end: its end and size, the table, checksums and lengths"""
    pieces: list[tuple[int, np.ndarray]]
    """(position, uint8) of each buffer"""
    nbytes: int
    """Bytes of the segment, alignment included"""

    @property
    def sent_bytes(self) -> int:
        """Bytes written, alignment between buffers excluded."""
        return COVERED + len(self.table) + sum(piece.nbytes for _, piece in self.pieces)


def lay_out(columns: Mapping[str, Stretch]) -> Contents:
    """Lay columns out as a segment, and compute their checksums; equal lengths of several columns are stored once."""
    distinct: list[np.ndarray] = []
    lengths_of: dict[str, int] = {}
    for name, column in columns.items():
        if column.offsets is not None:
            index = index_of_lengths(smallest(np.diff(column.offsets)), distinct)
            assert index is not None
            lengths_of[name] = index
    sums = sums_of([(c.data, Blocks.of(c.layout, c.data.nbytes, c.offsets)) for c in columns.values()])
    tables = [sums, *distinct]
    table_bytes = 0
    while True:  # positions depend on the length of the table that lists them
        places, end = _places(HEAD + table_bytes, tables, 8)
        starts, nbytes = _places(end + -end % ALIGN, [column.data for column in columns.values()], ALIGN)
        entries = []
        for (name, column), start in zip(columns.items(), starts, strict=True):
            where = None
            if name in lengths_of:
                lengths = distinct[lengths_of[name]]
                where = (places[1 + lengths_of[name]], lengths.dtype.str, len(lengths))
            entries.append((name, *column.layout.fields, (start, column.data.nbytes), where))
        about = {"format": FORMAT, "sums": (places[0], len(sums)), "columns": entries}
        encoded = to_json(about)
        if len(encoded) <= table_bytes:
            break
        table_bytes = len(encoded) + 16
    table = bytearray(end - COVERED)
    table[: HEAD - COVERED] = np.array([end, table_bytes], np.int64).tobytes()
    table[HEAD - COVERED : HEAD - COVERED + table_bytes] = encoded.ljust(table_bytes)
    for place, piece in zip(places, tables, strict=True):
        table[place - COVERED : place - COVERED + piece.nbytes] = piece.tobytes()
    pieces = [(start, column.data) for start, column in zip(starts, columns.values(), strict=True)]
    return Contents(bytes(table), pieces, nbytes)


def _places(start: int, pieces: Sequence[np.ndarray], align: int) -> tuple[list[int], int]:
    """Place pieces one after the other, each aligned. Return (position of each, end of the last)."""
    places, at = [], start
    for piece in pieces:
        at += -at % align
        places.append(at)
        at += piece.nbytes
    return places, at
