"""The next tokens of a step's sequences, the same on every rank that schedules them.

hidden ─► logits of this TP rank's share of the vocabulary ─► whole rows ─► sampler ─► (last stage broadcasts)
(run seed, request, position) ─► noise ──────────────────────────────────────┘
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.batch import Batch
from fusion.inference.noise import uniforms
from fusion.inference.sampler import sample
from fusion.inference.sequence import Sequence
from fusion.model import Mesh, Transformer

NOISE_AHEAD = 16
"""Positions for which a sequence's noise is drawn at a time."""


class Draw:
    """Collective over the mesh's TP and PP groups. ``seed``: of the run."""

    def __init__(self, model: Transformer, mesh: Mesh, seed: int):
        self.model, self.mesh, self.seed = model, mesh, seed

    def __call__(
        self, hidden: torch.Tensor | None, batch: Batch, sampled: list[Sequence]
    ) -> tuple[list[int], list[float]]:
        """The next tokens of ``sampled`` and their log-probabilities, drawn on the last stage, the same on all."""
        noise = self._noise(sampled)
        drawn = torch.empty(2, len(sampled), dtype=torch.float64)
        if hidden is not None:
            if batch.sampled is not None:
                hidden = hidden.index_select(0, batch.sampled)
            logits = self._whole_rows(self.model.logits(hidden))
            tokens, logprobs = sample(logits, [seq.params for seq in sampled], noise)
            if self.mesh.pp_group is None:
                return tokens, logprobs
            drawn[0], drawn[1] = torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64)
        dist.broadcast(drawn, group=self.mesh.pp_group, group_src=self.mesh.parallel.pp - 1)
        return drawn[0].long().tolist(), drawn[1].tolist()

    def _whole_rows(self, logits_nVl: torch.Tensor) -> torch.Tensor:
        """The columns of every TP rank side by side: [n, V]."""
        group = self.mesh.tp_group
        if group is None:
            return logits_nVl
        rows, columns = logits_nVl.shape
        ranks = self.mesh.parallel.tp
        shards = logits_nVl.new_empty(ranks * rows, columns)
        dist.all_gather_into_tensor(shards, logits_nVl.contiguous(), group=group)
        return shards.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)

    def _noise(self, sampled: list[Sequence]) -> np.ndarray:
        """A number for each sequence's next position. Drawn some positions ahead: ten rounds over few numbers cost a
        step as much as over many."""
        dry = [seq for seq in sampled if not seq.noise]
        if dry:
            keys = np.fromiter((seq.noise_key for seq in dry), np.uint64, len(dry)).repeat(NOISE_AHEAD)
            next_ = np.fromiter((len(seq.tokens) for seq in dry), np.int64, len(dry))
            ahead = uniforms(self.seed, keys, (next_[:, None] + np.arange(NOISE_AHEAD)[::-1]).ravel())
            for seq, numbers in zip(dry, ahead.reshape(len(dry), NOISE_AHEAD).tolist(), strict=True):
                seq.noise = numbers
        return np.array([seq.noise.pop() for seq in sampled])
