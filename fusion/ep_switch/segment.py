"""What goes from one rank to another in a round, as views of storage: packed on a wire, or read where it lies.

Moves that follow each other in storage too are one run, a round's runs are copied in one call a peer. Views are made
when their storage is there for the first time, and stay valid over its releases: the second switch makes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from fusion.ep_switch.checksum import NO_SUM, run_sums
from fusion.ep_switch.layout import Place
from fusion.ep_switch.moves import Move
from fusion.model.table import Box
from fusion.npu import Device

MAX_SUMS = 1024
"""Checksums of one segment that are sent with it."""


Flats = list[torch.Tensor] | dict[int, torch.Tensor]
"""Storage units by index: a rank's own, or what it has mapped of another's."""


class Run(NamedTuple):
    """Elements of one storage unit that lie one after the other on the wire; ``name`` is the first global tensor."""

    flats: Flats
    place: Place
    shape: tuple[int, ...]
    name: str

    @property
    def view(self) -> torch.Tensor:
        return self.place.view(self.flats, self.shape)


class Segment:
    """What one peer gets from this rank in a round, or brings it: one stretch of the wire, or read where it lies.

    Args:
        into: where it goes on this rank, if it comes.
        out_of: where it comes from: (storage of the source, of the target for what is relayed) of who sends it. At who
            receives it, mappings of that, which `map` fills.
    """

    def __init__(self, peer: int, moves: Sequence[Move], into: Flats | None, out_of: tuple[Flats, Flats]):
        self.peer, self.moves, self._into, self._out_of = peer, moves, into, out_of
        ends = [(move, move.target, into) if into is not None else (move, move.source, out_of[move.relayed])
                for move in moves]  # fmt: skip
        self.runs = _merged(_run(*end) for end in ends)
        self.sizes = [prod(run.shape) for run in self.runs]
        self.numel = sum(self.sizes)
        self._handles: tuple[bytes, ...] = ()
        self._there: list[torch.Tensor] = []

    @property
    def name(self) -> str:
        """Its first global tensor, for messages."""
        return self.moves[0].name

    @cached_property
    def pieces(self) -> list[tuple[str, Box, int]]:
        """(global tensor, box, where it ends on the wire) of all that lies in it."""
        starts = accumulate((move.numel for move in self.moves), initial=0)
        return [
            (name, box, start + stop)
            for start, move in zip(starts, self.moves, strict=False)
            for name, box, _, stop in move.pieces()
        ]

    @cached_property
    def ends(self) -> list[int]:
        """Where its pieces end, of very many only some: what a checksum tells apart."""
        ends = [end for _, _, end in self.pieces]
        return ends[:: -(len(ends) // MAX_SUMS + 1)][::-1]

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [run.view for run in self.runs]

    def pack(self, wire: torch.Tensor) -> None:
        """Storage → ``wire`` [numel], contiguous, converted to its dtype."""
        copy(self._along(wire), self.views, self.runs)

    def unpack(self, wire: torch.Tensor) -> None:
        """``wire`` [numel], contiguous → storage."""
        copy(self.views, self._along(wire), self.runs)

    @cached_property
    def lent(self) -> list[tuple[bool, int]]:
        """(relayed, unit) of the sender's storage that it lies in; the same on both ends."""
        return list(dict.fromkeys((move.relayed, move.source.unit) for move in self.moves))

    def lent_storage(self) -> list[torch.Tensor]:
        """The units `lent`, at the sender."""
        return [self._out_of[relayed][unit] for relayed, unit in self.lent]

    @cached_property
    def pairs(self) -> tuple[list[Run], list[Run]]:
        """(into, out of) at the receiver, pairwise, where it reads straight from the sender's storage."""
        assert self._into is not None
        return paired(self.moves, self._into, self._out_of)

    def map(self, handles: tuple[bytes, ...], device: Device, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """Makes the sender's units, found by their handles, those that `read` reads. They seldom move.

        Raises:
            ValueError: the sender has ended.
        """
        if handles == self._handles:
            return
        for (relayed, unit), handle in zip(self.lent, handles, strict=True):
            self._out_of[relayed][unit] = device.map(handle).view(dtypes[relayed])  # type: ignore[index]
        self._handles = handles
        self._there = [run.view for run in self.pairs[1]]

    @cached_property
    def _here(self) -> list[torch.Tensor]:
        return [run.view for run in self.pairs[0]]

    def read(self) -> None:
        """The sender's storage, mapped → storage."""
        copy(self._here, self._there, self.pairs[0])

    def sums(self, wire: torch.Tensor) -> torch.Tensor:
        """Checksums (int64, on the card) of what lies on ``wire`` [numel], one for each of `ends`.

        Raises:
            TransferError: there is no memory for the arithmetic.
        """
        try:
            return run_sums(wire, self.ends)
        except Exception as error:
            raise TransferError(self.name, str(error)) from error

    def verify(self, scratch: torch.Tensor, expected: torch.Tensor) -> None:
        """Holds what was unpacked, read back out of the storage into ``scratch`` [numel], against the sender's sums.

        Raises:
            TransferError: they differ; names the first parameter that does.
        """
        self.pack(scratch)
        expected = expected.cpu()
        wrong = ((self.sums(scratch).cpu() != expected) & (expected != NO_SUM)).nonzero()
        if wrong.numel():
            first = int(wrong[0])
            start, stop = self.ends[first - 1] if first else 0, self.ends[first]
            (name, box, _), *others = (piece for piece in self.pieces if start < piece[2] <= stop)
            more = f", or one of the {len(others)} pieces behind it," if others else ""
            raise TransferError(name, f"{name} {list(box)}{more} from rank {self.peer} arrived with another checksum")

    def _along(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """Where its runs lie in ``wire`` [numel], as views in their shapes."""
        if len(self.runs) == 1:
            return [wire.view(self.runs[0].shape)]
        pieces = zip(wire.split_with_sizes(self.sizes), self.runs, strict=True)
        return [piece if len(run.shape) == 1 else piece.view(run.shape) for piece, run in pieces]


class TransferError(RuntimeError):
    """What failed in a round; ``parameter`` is the tensor it was about."""

    def __init__(self, parameter: str, reason: str):
        super().__init__(reason)
        self.parameter = parameter


def copy(into: list[torch.Tensor], out_of: list[torch.Tensor], runs: Sequence[Run]) -> None:
    """Copies views pairwise, in one call.

    Raises:
        TransferError: with the name of the run that failed.
    """
    try:
        if len(into) == 1:
            into[0].copy_(out_of[0])
        else:
            torch._foreach_copy_(into, out_of)
    except Exception:
        for target, source, run in zip(into, out_of, runs, strict=True):
            try:
                target.copy_(source)
            except Exception as error:
                raise TransferError(run.name, str(error)) from error
        raise


def _run(move: Move, place: Place, flats: Flats) -> Run:
    if len(move.shape) > 1 and _dense(move.shape, place.strides):
        return Run(flats, place._replace(strides=(1,)), (move.numel,), move.name)
    return Run(flats, place, move.shape, move.name)


def _merged(found: Iterable[Run]) -> list[Run]:
    """Those that lie one after the other as one."""
    runs: list[Run] = []
    for run in found:
        last = runs[-1] if runs else None
        if last and _follows(run, last):
            runs[-1] = last._replace(shape=(last.shape[0] + run.shape[0],))
        else:
            runs.append(run)
    return runs


def paired(moves: Iterable[Move], target: Flats, sources: tuple[Flats, Flats]) -> tuple[list[Run], list[Run]]:
    """(into, out of) of moves, pairwise; those that lie one after the other on both ends as one."""
    into: list[Run] = []
    out_of: list[Run] = []
    for move in moves:
        one, other = _run(move, move.target, target), _run(move, move.source, sources[move.relayed])
        if len(one.shape) != len(other.shape):  # a box that is contiguous at one end only
            one, other = (
                one._replace(shape=move.shape, place=move.target),
                other._replace(shape=move.shape, place=move.source),
            )
        if into and _follows(one, into[-1]) and _follows(other, out_of[-1]):
            shape = (into[-1].shape[0] + one.shape[0],)
            into[-1], out_of[-1] = into[-1]._replace(shape=shape), out_of[-1]._replace(shape=shape)
        else:
            into.append(one)
            out_of.append(other)
    return into, out_of


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _follows(run: Run, last: Run) -> bool:
    return (
        run.flats is last.flats
        and run.place.unit == last.place.unit
        and run.place.strides == last.place.strides == (1,)
        and last.place.offset + last.shape[0] == run.place.offset
    )
