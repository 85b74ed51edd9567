"""Reduce the logits of a micro-batch tile by tile, and compute their gradient tile by tile.

A tile is a rectangle of rows and of this TP rank's ids; `TileRows` is what belongs to the rows of one. It is reduced to
four numbers per row, where m is the largest logit:

    m,   s = Σ e^(x-m),   u = Σ e^(x-m) (x-m),   the target's x (0 if its logit is in another tile)

and, where only some ids of a row are kept, to m, s and u of these; and, where the head masks ids, to log Σ e^x of their
logits. Computed in float32 for any dtype of the logits. On a card the time of a tile is that of the bytes that its
operations read and write: of a logit in bf16, products included, 38 here and 34 in the backward pass without entropy.

Invariants: a pass holds the logits of one tile and two float32 copies of them at most; it never waits for the card."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fusion.model import Head
from fusion.npu import to_card
from fusion.training.batch import KeptIds
from fusion.training.segments import Segments


@dataclass(frozen=True)
class Cells:
    """The kept ids of a chunk of rows: where those of each row lie, the global id of each, int64, and which rows keep
    the vocabulary."""

    of_rows: Segments
    ids: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, kept: KeptIds, device: torch.device) -> "Cells":
        """Copy the kept ids of a chunk to the card."""
        return cls(Segments(kept.counts, device), to_card(kept.ids, device), to_card(kept.counts == 0, device))


@dataclass(frozen=True)
class TileRows:
    """A chunk of n rows: hidden states [n, D], int64 targets [n] and kept ids; for the backward pass, float32 [n], also
    log Z and entropy, and the gradients of log-probability and entropy, None where there are none."""

    hidden: torch.Tensor
    targets: torch.Tensor
    cells: Cells | None = None
    log_z: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    grad_logprob: torch.Tensor | None = None
    grad_entropy: torch.Tensor | None = None


class Logits(NamedTuple):
    """Logits of a tile [n, ids], with the graph to the leaves that they were computed from: hidden states [n, D] and
    weights of the head."""

    leaves: list[torch.Tensor]
    values: torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """The tiles of the logits of a micro-batch on this rank.
    ``row_chunk``: rows of a tile.
    ``id_ranges``: ids of a tile, counted from this rank's first.
    ``first_id``: of this rank.
    ``cells``: those of each chunk of rows; None: all ids are kept.
    ``with_mass``: whether to reduce what the head masks."""

    head: Head
    row_chunk: int
    id_ranges: list[range]
    first_id: int
    temperature: float
    cells: list[Cells] | None
    with_mass: bool

    def rows(self, **columns: torch.Tensor | None) -> list[TileRows]:
        """Split the columns of a micro-batch, by their names in `TileRows`, into those of its chunks of rows."""
        chunks: dict[str, Sequence[Any]] = {
            name: column.split(self.row_chunk) for name, column in columns.items() if column is not None
        }
        if self.cells is not None:
            chunks["cells"] = self.cells
        return [TileRows(**dict(zip(chunks, chunk, strict=True))) for chunk in zip(*chunks.values(), strict=True)]

    def logits(self, rows: TileRows, ids: range, removed: list[torch.Tensor] | None = None) -> Logits:
        """Compute the logits of a tile. ``removed``: as of `IdMask`."""
        with torch.enable_grad():
            hidden, *weights = (leaf.detach() for leaf in (rows.hidden, *self.head.weights_of(ids)))
            leaves = [hidden, *weights] if self.head.trained else [hidden]
            for leaf in leaves:
                leaf.requires_grad_()
            return Logits(leaves, self.head.logits_of(hidden, weights, ids, removed))

    def reduce(self, rows: TileRows, ids: range, kept_logits: list[Logits] | None = None) -> torch.Tensor:
        """Reduce a tile to the numbers of each of its n rows, float32 [4, n] or more: the target's x, m, s and u; m, s
        and u of kept ids; log Σ e^x of masked ids. ``kept_logits``: to which the logits are added, for `gradients`."""
        removed: list[torch.Tensor] = []
        masked_to = removed if self.with_mass else None
        if kept_logits is None:
            logits = self._scaled(self.head.logits_of(rows.hidden, self.head.weights_of(ids), ids, masked_to))
        else:
            kept_logits.append(self.logits(rows, ids, masked_to))
            logits = self._scaled(kept_logits[-1].values.detach(), copy=True)
        cells = rows.cells
        column, is_here = self._columns(rows.targets, ids)
        target = logits.gather(1, column.unsqueeze(1)).squeeze(1).float().where(is_here, 0.0)
        kept = [] if cells is None else _sums_of_cells(logits, cells.of_rows, *self._columns(cells.ids, ids))
        peak = logits.amax(dim=1).float()
        x = _less(logits, peak) if kept_logits is None else logits - peak.unsqueeze(1)
        exp = x.exp()
        total = exp.sum(1)
        masked = [self._scaled(values).float().logsumexp(1) for values in removed]
        return torch.stack([target, peak, total, exp.mul_(x).sum(1), *kept, *masked])

    def gradients(self, rows: TileRows, ids: range, kept: Logits | None = None) -> tuple[torch.Tensor, ...]:
        """Return the share of a tile in the gradient of its hidden states, and the gradients of the head's weights of
        its ids, `Head.weights_of`; none of a head that is not trained. ``kept``: its logits, which are overwritten;
        None: they are computed again."""
        leaves, logits = kept or self.logits(rows, ids)
        return torch.autograd.grad(logits, leaves, self._of_logits(logits.detach(), rows, ids))

    def _of_logits(self, logits: torch.Tensor, rows: TileRows, ids: range) -> torch.Tensor:
        """Return the gradient of a tile's logits, which are overwritten."""
        assert rows.log_z is not None and rows.entropy is not None
        logp, of_entropy = _less(self._scaled(logits), rows.log_z), rows.grad_entropy
        p = logp.exp_() if of_entropy is None else logp.exp()
        if rows.cells is not None:
            p.masked_fill_(self._outside(rows.cells, ids), 0.0)
        if of_entropy is not None:
            logp.add_(rows.entropy.unsqueeze(1)).mul_(p)
        if rows.grad_logprob is None:
            grad = p.zero_()
        else:
            column, is_here = self._columns(rows.targets, ids)
            grad = p.mul_(-rows.grad_logprob.unsqueeze(1))
            grad.scatter_add_(1, column.unsqueeze(1), (rows.grad_logprob * is_here).unsqueeze(1))
        if of_entropy is not None:
            grad.addcmul_(logp, of_entropy.unsqueeze(1), value=-1)
        del logp  # before the gradient is copied to the logits' dtype
        return (grad if self.temperature == 1.0 else grad.div_(self.temperature)).to(logits.dtype)

    def _outside(self, cells: Cells, ids: range) -> torch.Tensor:
        """Return which logits of a tile are not of kept ids: bool [n, ids]."""
        column, is_here = self._columns(cells.ids, ids)
        outside = cells.whole.logical_not().unsqueeze(1).repeat(1, len(ids) + 1)
        # those of other tiles fall into the last column
        outside[cells.of_rows.owner_n, column.where(is_here, len(ids))] = False
        return outside[:, :-1]

    def _columns(self, global_ids: torch.Tensor, ids: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column of each id in a tile, 0 if it is in another one, and which are in this one."""
        column = global_ids - (self.first_id + ids.start)
        is_here = (column >= 0) & (column < len(ids))
        return column.where(is_here, 0), is_here

    def _scaled(self, logits: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """Return the logits at the temperature, in float32 unless it is 1; float32 ones in place, unless ``copy``."""
        return logits if self.temperature == 1.0 else logits.to(torch.float32, copy=copy).div_(self.temperature)


def _less(logits: torch.Tensor, values_n: torch.Tensor) -> torch.Tensor:
    """Return float32 logits less a number of each row; float32 ones are overwritten."""
    values_n1 = values_n.unsqueeze(1)
    return logits.sub_(values_n1) if logits.dtype == torch.float32 else logits - values_n1


def _sums_of_cells(
    x: torch.Tensor, of_rows: Segments, column: torch.Tensor, is_here: torch.Tensor
) -> list[torch.Tensor]:
    """Return (m, s, u) of each row's cells that are here [n]; of a row without any (the smallest number, 0, 0)."""
    smallest, row = torch.finfo(torch.float32).min, of_rows.owner_n
    values = x[row, column].float().where(is_here, smallest)
    peak = values.new_full((len(x),), smallest).scatter_reduce(0, row, values, "amax")
    shifted = values - peak[row]
    exp = shifted.exp().where(is_here, 0.0)
    return [peak, *of_rows.sums(torch.stack([exp, exp * shifted], 1)).unbind(1)]
