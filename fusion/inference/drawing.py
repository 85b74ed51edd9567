"""Sample the next tokens of a step's sequences, the same on every rank that schedules them.

hidden ─► logits of this TP rank's share of the vocabulary ─► whole rows ─► sampler ─► (last stage broadcasts)
(run seed, request, position) ─► noise ──────────────────────────────────────┘   tokens, logprobs, kept ids
"""

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.noise import uniforms
from fusion.inference.sampler import Sampled, sample, split_kept
from fusion.inference.sequence import EngineStep, Sequence
from fusion.inference.verification import Verification
from fusion.model import Mesh, Transformer

NOISE_AHEAD = 16
"""Number of positions for which a sequence's noise is drawn at a time."""


class Draw:
    """Sample tokens. Collective over the mesh's TP and PP groups. ``seed``: seed of the run. ``max_rows``: rows whose
    logits are in memory at a time; a step without drafts has no more."""

    def __init__(self, model: Transformer, mesh: Mesh, seed: int, max_rows: int):
        self.model, self.mesh, self.seed, self.max_rows = model, mesh, seed, max_rows

    def __call__(self, hidden: torch.Tensor | None, sampled_rows: torch.Tensor | None, step: EngineStep) -> Sampled:
        """Return a token for each of ``step.drawn``, sampled on the last stage from ``hidden`` (None on the others),
        equal on all. ``sampled_rows``: int64 [S], the rows that are sampled; None: all."""
        noise, sequences = noise_of(step.sampled, self.seed), step.drawn
        if step.verified:
            noise = np.concatenate([noise, noise_of_rows(step.verified, self.seed)])
        sampled = None
        if hidden is not None:
            if sampled_rows is not None:
                hidden = hidden.index_select(0, sampled_rows)
            sampled = self._sample(hidden, sequences, noise)
            if self.mesh.pp_group is None:
                return sampled
        return self._spread(sampled, sequences)

    def _spread(self, sampled: Sampled | None, sequences: list[Sequence]) -> Sampled:
        """Broadcast what the last stage has sampled; None: on the others."""
        group, source = self.mesh.pp_group, self.mesh.parallel.pp - 1
        drawn = torch.zeros(3, len(sequences), dtype=torch.float64)
        if sampled is not None:
            drawn[0], drawn[1] = torch.tensor(sampled.tokens), torch.tensor(sampled.logprobs, dtype=torch.float64)
            if sampled.kept is not None:
                drawn[2] = torch.tensor([len(ids) // 4 for ids in sampled.kept])
        truncates = any(seq.params.truncates for seq in sequences)  # only then is there a third row to send
        drawn = drawn if truncates else drawn[:2]
        dist.broadcast(drawn, group=group, group_src=source)
        tokens, logprobs = drawn[0].long().tolist(), drawn[1].tolist()
        if not (truncates and drawn[2].any()):
            return Sampled(tokens, logprobs)
        ids, counts = torch.empty(int(drawn[2].sum()), dtype=torch.int32), drawn[2].long().tolist()
        if sampled is not None and sampled.kept is not None:
            ids = torch.frombuffer(bytearray(b"".join(sampled.kept)), dtype=torch.int32)
        dist.broadcast(ids, group=group, group_src=source)
        return Sampled(tokens, logprobs, split_kept(ids.numpy(), counts))

    def _sample(self, hidden: torch.Tensor, sequences: list[Sequence], noise: np.ndarray) -> Sampled:
        tokens: list[int] = []
        logprobs: list[float] = []
        kept: list[bytes] = []
        for start in range(0, len(sequences), self.max_rows):
            rows = slice(start, start + self.max_rows)
            logits = self._whole_rows(self.model.head.logits(hidden[rows]))
            some = sample(logits, [seq.params for seq in sequences[rows]], noise[rows])
            tokens += some.tokens
            logprobs += some.logprobs
            kept += [b""] * len(some.tokens) if some.kept is None else some.kept
        return Sampled(tokens, logprobs, kept if any(kept) else None)

    def _whole_rows(self, logits_nVl: torch.Tensor) -> torch.Tensor:
        """Gather the columns of all TP ranks: [n, V]."""
        group = self.mesh.tp_group
        if group is None:
            return logits_nVl
        rows, columns = logits_nVl.shape
        ranks = self.mesh.parallel.tp
        shards = logits_nVl.new_empty(ranks * rows, columns)
        dist.all_gather_into_tensor(shards, logits_nVl.contiguous(), group=group)
        return shards.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)


def noise_of(sampled: list[Sequence], seed: int) -> np.ndarray:
    """Return a number for each sequence's next position. Numbers are drawn for several positions at once, as the
    generator's ten rounds take about the same time for few numbers as for many."""
    empty = [seq for seq in sampled if not seq.noise]
    if empty:
        keys = np.fromiter((seq.noise_key for seq in empty), np.uint64, len(empty)).repeat(NOISE_AHEAD)
        next_ = np.fromiter((len(seq.tokens) for seq in empty), np.int64, len(empty))
        ahead = uniforms(seed, keys, (next_[:, None] + np.arange(NOISE_AHEAD)[::-1]).ravel())
        for seq, numbers in zip(empty, ahead.reshape(len(empty), NOISE_AHEAD).tolist(), strict=True):
            seq.noise = numbers
    return np.array([seq.noise.pop() for seq in sampled])


def noise_of_rows(verified: list[Verification], seed: int) -> np.ndarray:
    """Return a number for the position behind each row of drafts."""
    keys = np.array([one.seq.noise_key for one in verified], np.uint64).repeat([len(one) for one in verified])
    positions = np.concatenate([len(one.seq.tokens) + np.array(one.depths) for one in verified])
    return uniforms(seed, keys, positions)
