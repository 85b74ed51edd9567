"""Pack samples that are lists as `Sequences`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion.training import Sequences


def sequences_of(
    prompts: Sequence[Any],
    responses: Sequence[Any],
    *,
    advantages: Sequence[float] | torch.Tensor | None = None,
    trained: Sequence[bool] | None = None,
    **columns: Sequence[Any],
) -> Sequences:
    """Pack B samples. ``columns``: for each sample, a number per response token; ``trained``: False leaves a sample out
    of the loss."""
    batch = Sequences.from_packed(
        [len(prompt) for prompt in prompts],
        [len(response) for response in responses],
        prompts=_joined(prompts, torch.int64),
        responses=_joined(responses, torch.int64),
        advantages=None if advantages is None else torch.as_tensor(advantages),
        **{name: _joined(rows, torch.float32) for name, rows in columns.items()},
    )
    if trained is None:
        return batch
    kept_N = torch.tensor(trained, dtype=torch.bool).repeat_interleave(torch.tensor(batch.lengths, dtype=torch.int64))
    return replace(batch, loss_mask=batch.loss_mask & kept_N)


def _joined(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *(torch.as_tensor(row, dtype=dtype) for row in rows)])
