"""Forward passes of frozen models: log-probabilities of the reference, scores of the reward model.

packed sequences ─ micro-batches, as many on every rank ─► hidden_ND ─┬─► log-probability of every response token
                                                                     └─► score of every last token
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fusion.model import PackedAttention, Transformer
from fusion.training import Sequences
from fusion.training.batch import plan_micro_batches
from fusion.training.logprobs import trained_logprobs


@torch.no_grad()
def sequence_scores(model: Transformer, samples: Sequence[torch.Tensor], token_budget: int) -> list[float]:
    """Return the output of a reward model's head at the last token of each sample, in order.

    Collective over the model's mesh. ``samples``: int64 [L > 0] each, the same on the TP ranks; may be empty.
    """
    no_tokens = torch.empty(0, dtype=torch.int64)
    lengths = [len(sample) for sample in samples]
    sequences = Sequences.from_packed(
        lengths, [0] * len(lengths), prompts=torch.cat([no_tokens, *samples]), responses=no_tokens
    )
    scores = torch.zeros(len(samples))
    for indices, batch, hidden_ND in _forward(model, sequences, token_budget):
        if indices:
            last = torch.tensor(batch.lengths).cumsum(0) - 1
            scores_n1 = model.scores(hidden_ND.index_select(0, last.to(hidden_ND.device)))
            scores[indices] = scores_n1.squeeze(1).to("cpu", torch.float32)
    return scores.tolist()


@torch.no_grad()
def token_logprobs(model: Transformer, sequences: Sequences, *, token_budget: int, temperature: float) -> torch.Tensor:
    """Return float32 [N] on the CPU: the log-probability of every response token; 0 elsewhere. Collective over the
    mesh."""
    logprobs_N = torch.zeros(len(sequences.tokens))
    for indices, batch, hidden_ND in _forward(model, sequences, token_budget):
        values = trained_logprobs(model, batch, hidden_ND, temperature=temperature)
        logprobs_N[sequences.rows_of(indices)[batch.trained_rows]] = values.logprobs.cpu()
    return logprobs_N


def _forward(
    model: Transformer, sequences: Sequences, token_budget: int
) -> Iterator[tuple[list[int], Sequences, torch.Tensor]]:
    """Yield (indices of the sequences, micro-batch, its hidden states [N, D]); ranks with fewer run empty ones."""
    assert model.mesh.parallel.pp == 1
    plan = plan_micro_batches(sequences.lengths, token_budget)
    num_batches = torch.tensor([len(plan)])
    if model.mesh.world_group is not None:
        dist.all_reduce(num_batches, dist.ReduceOp.MAX, group=model.mesh.world_group)
    device = model.device.torch_device
    for indices in [*plan, *[[]] * (int(num_batches) - len(plan))]:
        batch = sequences.select(indices)
        attend = PackedAttention(batch.lengths, model.device.operators)
        yield indices, batch, model(batch.tokens.to(device), batch.positions.to(device), attend)
