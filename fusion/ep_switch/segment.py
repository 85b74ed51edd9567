"""Copy the data that one rank sends to another in a round: packed into a wire buffer, or read in place.

Moves that are contiguous in storage are merged to one run; a round's runs are copied in one call per peer. Views are
created when their storage is first allocated and stay valid over its releases, so the second switch creates none."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from fusion.ep_switch.checksum import NO_SUM, run_sums
from fusion.ep_switch.layout import Place, is_contiguous
from fusion.ep_switch.moves import Move
from fusion.model.boxes import Box
from fusion.npu import Device

MAX_SUMS = 1024
"""Maximum number of checksums that are sent with one segment."""


Flats = list[torch.Tensor] | dict[int, torch.Tensor]
"""Storage units by index: a rank's own, or those of another rank that it has mapped."""


Lent = tuple[bool, int]
"""(relayed, unit): a unit of the sender, of its target if relayed, else of its source."""


class Run(NamedTuple):
    """Locate elements of one storage unit that are contiguous on the wire; ``name`` is the first global tensor."""

    flats: Flats
    place: Place
    shape: tuple[int, ...]
    name: str

    @property
    def view(self) -> torch.Tensor:
        return self.place.view(self.flats, self.shape)


class PeerUnits:
    """Hold the units of another rank that this one reads in place. Views of them stay valid while they move."""

    def __init__(self) -> None:
        self.flats: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = {}, {}
        """(source storage, target storage for relayed moves)"""

    def map(
        self, units: Sequence[Lent], handles: bytes, *, device: Device, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """Map units by their handles. Raise ValueError: the rank has ended, or sent handles of other units."""
        known = [self.flats[relayed].get(index) for relayed, index in units]
        for (relayed, index), before, mapped in zip(units, known, device.map(handles, known), strict=True):
            if before is None:
                self.flats[relayed][index] = mapped.view(dtypes[relayed])


class PeerSegment:
    """Represent what this rank sends to, or receives from, one peer in a round: a range of the wire, or read in place.
    ``into``: this rank's storage that receives it; None: this rank sends it.
    ``out_of``: (source storage, target storage for relayed moves) of the sender; on the receiver, those `PeerUnits`."""

    def __init__(self, peer: int, moves: Sequence[Move], into: Flats | None, out_of: tuple[Flats, Flats]):
        self.peer, self.moves, self._into, self._out_of = peer, moves, into, out_of
        ends = [(move, move.target, into) if into is not None else (move, move.source, out_of[move.relayed])
                for move in moves]  # fmt: skip
        self.runs = [run for (run,) in _merged((_run(*end),) for end in ends)]
        self.sizes = [prod(run.shape) for run in self.runs]
        self.numel = sum(self.sizes)

    @property
    def name(self) -> str:
        """Name of its first global tensor, for messages."""
        return self.moves[0].name

    @cached_property
    def pieces(self) -> list[tuple[str, Box, int]]:
        """(global tensor, box, end on the wire) of every box in it."""
        starts = accumulate((move.numel for move in self.moves), initial=0)
        return [
            (name, box, start + stop)
            for start, move in zip(starts, self.moves, strict=False)
            for name, box, _, stop in move.pieces()
        ]

    @cached_property
    def ends(self) -> list[int]:
        """Ends of its checksummed ranges: of its pieces, or of groups of them if there are more than MAX_SUMS."""
        ends = [end for _, _, end in self.pieces]
        return ends[:: -(len(ends) // MAX_SUMS + 1)][::-1]

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [run.view for run in self.runs]

    def pack(self, wire: torch.Tensor) -> None:
        """Copy storage to ``wire`` [numel], contiguous, converted to its dtype."""
        copy(self._along(wire), self.views, self.runs)

    def unpack(self, wire: torch.Tensor) -> None:
        """Copy ``wire`` [numel], contiguous, to storage."""
        copy(self.views, self._along(wire), self.runs)

    @cached_property
    def lent(self) -> list[Lent]:
        """The sender's units that contain it; the same on both ends."""
        return list(dict.fromkeys((move.relayed, move.source.unit) for move in self.moves))

    @cached_property
    def is_resident(self) -> bool:
        """Whether the sender holds it before the first round: nothing of it is relayed."""
        return not any(relayed for relayed, _ in self.lent)

    @cached_property
    def pairs(self) -> tuple[list[Run], list[Run]]:
        """(into, out of) on the receiver, pairwise, where it reads directly from the sender's storage."""
        assert self._into is not None
        return paired(self.moves, self._into, self._out_of)

    @cached_property
    def _pair_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        into, out_of = self.pairs
        return [run.view for run in into], [run.view for run in out_of]

    def read(self) -> None:
        """Copy the sender's mapped storage to this rank's."""
        copy(*self._pair_views, self.pairs[0])

    def sums(self, wire: torch.Tensor) -> torch.Tensor:
        """Compute the checksums (int64, on the card) of ``wire`` [numel], one for each of `ends`.
        Raise TransferError: there is no memory for the computation."""
        try:
            return run_sums(wire, self.ends)
        except Exception as error:
            raise TransferError(self.name, str(error)) from error

    def verify(self, scratch: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare the unpacked data, read back from storage into ``scratch`` [numel], with the sender's checksums.
        Raise TransferError: they differ (names the first parameter that does)."""
        self.pack(scratch)
        expected = expected.cpu()
        wrong = ((self.sums(scratch).cpu() != expected) & (expected != NO_SUM)).nonzero()
        if wrong.numel():
            first = int(wrong[0])
            start, stop = self.ends[first - 1] if first else 0, self.ends[first]
            (name, box, _), *others = (piece for piece in self.pieces if start < piece[2] <= stop)
            more = f", or one of the {len(others)} pieces after it," if others else ""
            raise TransferError(name, f"{name} {list(box)}{more} from rank {self.peer} arrived with another checksum")

    def _along(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """Return views of ``wire`` [numel], one per run, in the runs' shapes."""
        if len(self.runs) == 1:
            return [wire.view(self.runs[0].shape)]
        pieces = zip(wire.split_with_sizes(self.sizes), self.runs, strict=True)
        return [piece if len(run.shape) == 1 else piece.view(run.shape) for piece, run in pieces]


class TransferError(RuntimeError):
    """Raised when an operation of a round fails; ``parameter`` names its tensor."""

    def __init__(self, parameter: str, reason: str):
        super().__init__(reason)
        self.parameter = parameter


def copy(into: list[torch.Tensor], out_of: list[torch.Tensor], runs: Sequence[Run]) -> None:
    """Copy views pairwise, in one call. Raise TransferError: a copy failed (names the run)."""
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
    if len(move.shape) > 1 and is_contiguous(move.shape, place.strides):
        return Run(flats, place._replace(strides=(1,)), (move.numel,), name=move.name)
    return Run(flats, place, move.shape, name=move.name)


def _merged(rows: Iterable[tuple[Run, ...]]) -> list[tuple[Run, ...]]:
    """Merge adjacent rows of runs that are contiguous in every column."""
    merged: list[tuple[Run, ...]] = []
    for row in rows:
        last = merged[-1] if merged else ()
        if last and all(map(_follows, row, last)):
            merged[-1] = tuple([run._replace(shape=(run.shape[0] + row[0].shape[0],)) for run in last])
        else:
            merged.append(row)
    return merged


def paired(moves: Iterable[Move], target: Flats, sources: tuple[Flats, Flats]) -> tuple[list[Run], list[Run]]:
    """Return the runs (into, out of) of moves, pairwise; adjacent ones that are contiguous on both ends are merged."""
    merged = _merged(_pair(move, target, sources[move.relayed]) for move in moves)
    return [into for into, _ in merged], [out_of for _, out_of in merged]


def _pair(move: Move, target: Flats, source: Flats) -> tuple[Run, Run]:
    into, out_of = _run(move, move.target, target), _run(move, move.source, source)
    if len(into.shape) != len(out_of.shape):  # a box that is contiguous at one end only
        into, out_of = (
            into._replace(shape=move.shape, place=move.target),
            out_of._replace(shape=move.shape, place=move.source),
        )
    return into, out_of


def _follows(run: Run, last: Run) -> bool:
    return (
        run.flats is last.flats
        and run.place.unit == last.place.unit
        and run.place.strides == last.place.strides == (1,)
        and last.place.offset + last.shape[0] == run.place.offset
    )
