"""Forward passes of frozen models: log-probabilities of the reference, scores of the reward model.

packed sequences ─ micro-batches, as many on every rank ─► hidden_ND ─┬─► log-probability of every response token
                                                                     └─► score of every last token
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fusion.model import Transformer
from fusion.training import Sequences
from fusion.training.logprobs import trained_logprobs
from fusion.training.micro_batches import attention_of, split_micro_batches


@torch.no_grad()
def sequence_scores(model: Transformer, samples: Sequence[torch.Tensor], token_budget: int) -> list[float]:
    """Return the output of a reward model's head at the last token of each sample, in order. Collective over the
    model's mesh. ``samples``: int64 [L > 0] each, the same on the TP ranks; may be empty."""
    no_tokens = torch.empty(0, dtype=torch.int64)
    lengths = [len(sample) for sample in samples]
    sequences = Sequences.from_packed(
        lengths, [0] * len(lengths), prompts=torch.cat([no_tokens, *samples]), responses=no_tokens
    )
    scores_N = torch.zeros(sequences.rows)
    for rows, batch, hidden_ND in _forward(model, sequences, token_budget, share="off"):
        if len(rows):
            last = batch.last_rows()
            scores_n1 = model.scores(hidden_ND.index_select(0, last.to(hidden_ND.device)))
            scores_N[rows[last]] = scores_n1.squeeze(1).to("cpu", torch.float32)
    return scores_N[sequences.last_rows()].tolist()


@torch.no_grad()
def token_logprobs(
    model: Transformer, sequences: Sequences, *, token_budget: int, temperature: float, share: str = "off"
) -> torch.Tensor:
    """Return float32 [N] on the CPU: the log-probability of every response token; 0 elsewhere. Collective over the
    mesh. ``share``: `training.share_prefixes`."""
    logprobs_N = torch.zeros(len(sequences.tokens))
    for rows, batch, hidden_ND in _forward(model, sequences, token_budget, share):
        values = trained_logprobs(model, batch, hidden_ND, temperature=temperature)
        logprobs_N[rows[batch.trained_rows]] = values.logprobs.cpu()
    return logprobs_N


def _forward(
    model: Transformer, sequences: Sequences, token_budget: int, share: str
) -> Iterator[tuple[torch.Tensor, Sequences, torch.Tensor]]:
    """Yield (rows of the sequences, micro-batch, its hidden states [N, D]); ranks with fewer run empty ones."""
    assert model.mesh.parallel.pp == 1
    places, batches = split_micro_batches(sequences, token_budget, share=share, mesh=model.mesh)
    num_batches = torch.tensor([len(batches)])
    if model.mesh.world_group is not None:
        dist.all_reduce(num_batches, dist.ReduceOp.MAX, group=model.mesh.world_group)
    padding = [(sequences.rows_of([]), sequences.select([]))] * (int(num_batches) - len(batches))
    device = model.device.torch_device
    for rows, batch in [*zip(places, batches, strict=True), *padding]:
        ids, positions = (batch.computed(column).to(device) for column in (batch.tokens, batch.positions))
        yield rows, batch, model(ids, positions, attention_of(batch, model.device))
