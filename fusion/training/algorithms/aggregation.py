"""Aggregate the losses of tokens to the loss of the global batch, by a weight and a normaliser of each token.

    loss = Σ token_weight · loss of the token / Σ normaliser        both sums over all ranks and micro-batches

                     token_weight    normaliser      result
    token_mean       1               token_weight    mean over the tokens of the batch (DAPO, arXiv 2503.14476, section
                                                     3.3)
    sequence_mean    1 / |y|         token_weight    mean over sequences of the mean over their tokens (GRPO, arXiv
                                                     2402.03300, eq. 3)
    constant         1               L / |y|         sum / (L times the number of sequences), as if every response were
                                                     padded to the maximum length L (Dr. GRPO, arXiv 2503.20783,
                                                     section 3.2)

|y| is the number of a sequence's trained tokens. The values depend only on the sequence itself, not on how the batch is
divided. Of a conversation in k branches each is a sequence, whose 1 / |y| is divided by k (`Sequences.shares`):
together they weigh as one sequence, in `constant` as one with the tokens of all."""

from dataclasses import replace

import torch

from fusion.training.batch import Sequences
from fusion.training.segments import owners


def weigh(sequences: Sequences, aggregation: str, max_response_length: int) -> Sequences:
    """Return ``sequences`` with the columns of the table above."""
    if aggregation == "token_mean":
        return sequences
    owner_N = owners(sequences.lengths)
    mask_N = sequences.loss_mask.to(torch.float32)
    trained_B = torch.zeros(len(sequences.lengths)).index_add(0, owner_N, mask_N)
    share_N = mask_N / trained_B.clamp(min=1)[owner_N]
    if sequences.shares is not None:
        share_N *= sequences.shares
    if aggregation == "sequence_mean":
        return replace(sequences, token_weight=share_N)
    assert aggregation == "constant", aggregation
    return replace(sequences, normaliser=max_response_length * share_N)
