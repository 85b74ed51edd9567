"""Mask the logits of ids that no token has, where a model computes its logits.

Models often have more rows in their vocabulary than their tokenizer has tokens. What is sampled there has no text: a
reward would score the response as if it were not there. `ModelConfig.masked_ids` holds such ids. Sampler, trainer and
reference all read the logits of a model, so that they agree.

Invariants: a masked id has probability 0, as its exponential underflows; its log-probability and every entropy are
finite, also where all ids of a TP rank are masked; no gradient flows through its logit. A model without masked ids has
no mask."""

from bisect import bisect_left

import torch

from fusion.model.config import ModelConfig
from fusion.model.mesh import Mesh

FLOOR = -1e20
"""Logit of a masked id. It stays finite in bfloat16, divided by any temperature, and summed over a vocabulary in
float32; minus infinity would make entropies NaN."""


class IdMask:
    """Mask the columns of logits that are in ``columns``, the ids whose logits a rank computes."""

    def __init__(self, config: ModelConfig, columns: range, device: torch.device | str):
        self._own = sorted(id - columns.start for id in config.every_masked_id if id in columns)
        self._columns = torch.tensor(self._own, dtype=torch.int64, device=device)

    @classmethod
    def of_rank(cls, config: ModelConfig, mesh: Mesh, device: torch.device | str) -> "IdMask | None":
        """Return the mask of a TP rank's share of the vocabulary; None if the model masks no id."""
        if not config.masked_ids or not mesh.last_stage:
            return None
        share = config.vocab_size // mesh.parallel.tp
        return cls(config, range(mesh.tp_rank * share, (mesh.tp_rank + 1) * share), device)

    def __call__(
        self, logits_nV: torch.Tensor, removed: list[torch.Tensor] | None = None, part: range | None = None
    ) -> torch.Tensor:
        """Mask logits in place and return them. ``removed``: receives what was masked, [n, M] without gradients.
        ``part``: which of the columns the logits are of; None: all."""
        masked = self._columns
        if part is not None:
            own = slice(bisect_left(self._own, part.start), bisect_left(self._own, part.stop))
            masked = self._columns[own] - part.start if part.start else self._columns[own]
        if removed is not None:
            removed.append(logits_nV.detach().index_select(1, masked))
        return logits_nV.index_fill_(1, masked, FLOOR)
