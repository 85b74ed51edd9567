"""Compute logits from hidden states: for this TP rank's share of the vocabulary, or for a range of it.

What reduces the logits of a micro-batch (`fusion/training/logprobs.py`) computes one range at a time (`tiling.py`)."""

from collections.abc import Sequence

import torch

from fusion.model.id_mask import IdMask
from fusion.model.matrix import places_of
from fusion.npu.operators import linear

MAX_KEPT_IDS = 1024
"""Maximum number of ids that truncated sampling (top-k, top-p, min-p) keeps of a distribution: of more, the most likely
ones. An engine records them with every token, and a trainer renormalises over them."""


class Head:
    """Compute logits with the weights of a language model's head. ``blocks``: the weights [ids, D] of this TP rank's
    ids, in consecutive blocks of rows. ``mask``: of ids that no token has; None: the model masks no id.
    ``row_multiple``: as of `fusion.npu.operators.rows.linear`."""

    def __init__(self, blocks: Sequence[torch.Tensor], mask: IdMask | None = None, row_multiple: int = 1):
        self.blocks, self.mask, self.row_multiple = list(blocks), mask, row_multiple
        self.num_ids = sum(len(block) for block in self.blocks)

    @property
    def trained(self) -> bool:
        """Whether the weights have gradients."""
        return any(block.requires_grad for block in self.blocks)

    def logits(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Compute this TP rank's columns of the logits, [n, V / tp], from hidden states [n, D]."""
        return self.logits_of(hidden_nD, self.blocks, range(self.num_ids))

    def logits_of(
        self,
        hidden_nD: torch.Tensor,
        weights: Sequence[torch.Tensor],
        ids: range,
        removed: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the logits [n, ids] of a range of this rank's ids with their ``weights`` (`weights_of`, or copies
        with gradients of their own). ``removed``: as of `IdMask`."""
        logits = [linear(hidden_nD, weight, self.row_multiple) for weight in weights]
        logits_nI = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
        return logits_nI if self.mask is None else self.mask(logits_nI, removed, ids)

    def places_of(self, ids: range) -> list[tuple[int, slice]]:
        """Return where the rows of a range of this rank's ids lie: block and rows of it, in order."""
        return places_of(self.blocks, ids)

    def weights_of(self, ids: range) -> list[torch.Tensor]:
        """Return the weights of a range of this rank's ids, views of `blocks`."""
        return [self.blocks[index][rows] for index, rows in self.places_of(ids)]
