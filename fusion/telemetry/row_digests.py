"""Seal the rows of a log that lies beside a checkpoint, and find those that were damaged since.

    metrics.jsonl    row ║ row ║ row ║ row     written after the checkpoint: cut by a resume
    manifest.json    block block block ┘

A block is the digest of some rows and the byte at which they end: of 1,000 rows, or of each row (`SINGLE_ROWS`); the
last block has what is left. Rows stay in their file as they are; the checkpoint's manifest lists the blocks.

Invariants:
1. Every byte of a log is digested once: a seal costs the rows since the last one.
2. `rewind` keeps the rows of blocks that are as they were sealed, byte for byte, in their order, and no others.
3. Rows that were appended after the seal, whole or torn, are cut and are no damage."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import xxhash

from fusion.telemetry.files import open_temporary, write_all

ROWS = 1000
"""Number of rows of a block"""
SINGLE_ROWS = frozenset({"metrics.jsonl", "evaluations.jsonl", "control.jsonl"})
"""Logs of which every row is a block: few rows, each many times as long as its digest"""
COPY_BYTES = 1 << 20


class Block(NamedTuple):
    """Rows that follow those of the block before it."""

    end: int
    """Byte behind its last row"""
    rows: int
    """Number of rows of the file up to there"""
    xxh3_128: str


@dataclass(frozen=True)
class Seal:
    """The blocks of a log. ``before``: what the last block was before its row was completed; it is accepted, too, as a
    run may be killed between the seal and the write."""

    blocks: tuple[Block, ...] = ()
    before: Block | None = None

    def to_json(self) -> list[list[str]]:
        listed = [list(self.blocks), [self.before] if self.before else []]
        return [[f"{block.end} {block.rows} {block.xxh3_128}" for block in blocks] for blocks in listed]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[str]]) -> "Seal":
        """Rebuild a seal. Raise ValueError, TypeError: anything that `to_json` does not return."""
        blocks, before = ([_block(*text.split()) for text in some] for some in value)
        if any(a.end >= b.end or a.rows >= b.rows for a, b in pairwise([Block(0, 0, ""), *blocks])):
            raise ValueError("blocks that do not ascend")
        return cls(tuple(blocks), before[0] if before else None)


def _block(end: str, rows: str, digest: str) -> Block:
    return Block(int(end), int(rows), digest)


NO_SEALS: Mapping[str, Seal] = MappingProxyType({})


class RowDigests:
    def __init__(self, rows_per_block: int) -> None:
        self._rows_per_block = rows_per_block
        self._blocks: list[Block] = []
        self._open, self._end, self._rows = xxhash.xxh3_128(), 0, 0

    def add(self, rows: Iterable[bytes]) -> None:
        """Digest further rows, each with its newline."""
        for row in rows:
            self._open.update(row)
            self._end, self._rows = self._end + len(row), self._rows + 1
            if self._rows % self._rows_per_block == 0:
                self._blocks.append(self._block())
                self._open.reset()

    def seal(self, path: Path, end: int) -> Seal:
        """Digest the rows of the file that were written since, up to the byte ``end``; return all blocks."""
        if end > self._end:
            with _opened(path) as file:
                file.seek(self._end)
                while self._end < end and (row := file.readline()).endswith(b"\n"):
                    self.add([row])
        return self.sealed()

    def sealed(self) -> Seal:
        """Return the blocks of all rows so far."""
        return Seal((*self._blocks, *([self._block()] if self._rows % self._rows_per_block else [])))

    def _block(self) -> Block:
        return Block(self._end, self._rows, self._open.hexdigest())


@dataclass
class KeptRows:
    """What `rewind` did with the rows of a log."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    """Kept bytes, ascending"""
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of the rows that were dropped as they are damaged, from 1"""
    num_cut: int = 0
    """Number of rows of later steps"""

    def keep(self, start: int, end: int) -> None:
        extends = bool(self.spans) and self.spans[-1][1] == start
        self.spans[-1:] = [(self.spans[-1][0], end)] if extends else [*self.spans[-1:], (start, end)]

    def drop(self, first: int, last: int) -> None:
        extends = bool(self.damaged) and self.damaged[-1][1] == first - 1
        self.damaged[-1:] = [(self.damaged[-1][0], last)] if extends else [*self.damaged[-1:], (first, last)]


def rewind(path: Path, step: int, seal: Seal | None) -> tuple[int, str | None]:
    """Cut a log to the rows that it had when it was sealed, less those that are damaged.
    ``seal``: None: it has none; rows of steps after ``step`` are cut, and what is no object with a step is damaged.
    Return the number of rows of later steps, and a line that names damaged rows; then the file is kept as a copy."""
    if not path.exists():
        return 0, f"{path.name} is missing: it had {seal.blocks[-1].rows} rows" if seal and seal.blocks else None
    kept = _by_step(path, step) if seal is None else _by_seal(path, seal)
    aside = _write(path, kept)
    if not kept.damaged:
        return kept.num_cut, None
    numbers = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in kept.damaged)
    return kept.num_cut, f"{path.name}: damaged rows were dropped ({numbers}); the damaged file is kept as {aside}"


def _by_seal(path: Path, seal: Seal) -> KeptRows:
    kept, start, gap, begin, first = KeptRows(), 0, 0, 0, 1
    with _opened(path) as file:
        for block in seal.blocks:
            accepted = [block, seal.before] if seal.before and block is seal.blocks[-1] else [block]
            # The rows before it are damaged, or gone: a resume that dropped them has ended before its first checkpoint.
            starts = dict.fromkeys((start + gap, start))
            places = [(at, at + sealed.end - begin, sealed) for at in starts for sealed in accepted]
            whole = next((place for place in places if _matches(file, *place)), None)
            if whole is None:
                kept.drop(first, block.rows)
                gap += block.end - begin
            else:
                kept.keep(*whole[:2])
                start, gap = whole[1], 0
            begin, first = block.end, block.rows + 1
        file.seek(start + gap)
        kept.num_cut = sum(line.endswith(b"\n") for line in file)
    return kept


def _matches(file: BinaryIO, start: int, end: int, block: Block) -> bool:
    file.seek(start)
    return xxhash.xxh3_128_hexdigest(file.read(end - start)) == block.xxh3_128


def _by_step(path: Path, step: int) -> KeptRows:
    kept, end = KeptRows(), 0
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            start, end = end, end + len(line)
            if not line.endswith(b"\n"):
                break
            if (of := _step_of(line)) is None:
                kept.drop(number, number)
            elif of <= step:
                kept.keep(start, end)
            else:
                kept.num_cut += 1
    return kept


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _write(path: Path, kept: KeptRows) -> Path | None:
    """Leave only the kept bytes in the file; if rows are damaged, return the path of a copy of it as it was."""
    aside = path.with_name(f"{path.name}.damaged") if kept.damaged else None
    if aside is not None:
        while aside.exists():
            aside = aside.with_name(f"{aside.name}-again")
        _copy(path, [(0, path.stat().st_size)], aside)
    end = kept.spans[-1][1] if kept.spans else 0
    if len(kept.spans) <= 1 and (not kept.spans or kept.spans[0][0] == 0):
        with _opened(path, os.O_RDWR) as file:
            os.ftruncate(file.fileno(), min(end, os.fstat(file.fileno()).st_size))
    else:
        _copy(path, kept.spans, path)
    return aside


def _copy(path: Path, spans: Iterable[tuple[int, int]], target: Path) -> None:
    """Replace the target by these bytes of a file, atomically."""
    temporary, fd = open_temporary(target)
    try:
        with _opened(path) as file, open(fd, "wb", buffering=0):
            for start, end in spans:
                file.seek(start)
                while piece := file.read(min(COPY_BYTES, end - file.tell())):
                    write_all(fd, piece, path=target)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _opened(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    return open(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
