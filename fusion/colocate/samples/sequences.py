"""Convert the queue's columns to the trainer's sequences, and back.

queue columns ─► StageReader ─► Received ─to_sequences─► trainer Sequences ─► logprobs ─response_column─► queue column

A pipeline stage has the columns that it computes with (`stage_columns`): the first stage the tokens, the last one the
labels and the loss's inputs. The samples' lengths are known to all stages. Of a conversation all tokens are inputs, and
only the sampled ones have log-probabilities, a loss and a divergence from the reference."""

from collections.abc import Sequence

import torch

from distqueue import Column, PackedBatch
from distqueue.hierarchy import Received
from fusion.model import Mesh
from fusion.rollout.packing import KEPT, ROUTING, SAMPLED, SHARE
from fusion.training import Sequences
from fusion.training.batch import response_rows

TOKENS = ("prompt", "response")
"""Inputs of a forward pass."""
LABELS = ("response",)
"""Tokens whose log-probabilities are computed."""
LOSS = ("behaviour_logprobs", "advantage", "versions")
"""Inputs of a loss in addition to the log-probabilities; also `REFERENCE` if it has a KL term."""
REFERENCE = "ref_logprobs"


def stage_columns(mesh: Mesh, loss_columns: Sequence[str] = (), expert_columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the columns that a rank of ``mesh`` needs: tokens in the first stage, labels and ``loss_columns`` in the
    last one, ``expert_columns`` in every stage."""
    first = TOKENS if mesh.first_stage else ()
    last = (*LABELS, *loss_columns) if mesh.last_stage else ()
    return tuple(dict.fromkeys((*first, *last, *expert_columns)))


def empty_samples(columns: Sequence[str]) -> Received:
    batch = PackedBatch((), {name: Column(torch.empty(0)) for name in columns})
    return Received(batch, {name: torch.empty(0, dtype=torch.int64) for name in (*TOKENS, *columns)})


def to_sequences(received: Received, layers: range | None = None) -> Sequences:
    """Convert samples, with the columns that were received, to the trainer's sequences; of their routing the stage's
    sparse ``layers``, counted among all sparse ones (None: all). Raise ValueError if the number of values in a column
    differs from that of a sample's response tokens, or in `routing` from one less than that of all its tokens; or a
    token is not among its kept ids."""
    batch, lengths = received.batch, received.lengths
    for name in ("behaviour_logprobs", "versions", SAMPLED, REFERENCE, KEPT[0]):
        if name in batch.columns and not lengths[name].equal(lengths["response"]):
            row = int((lengths[name] != lengths["response"]).nonzero()[0])
            has, tokens = int(lengths[name][row]), int(lengths["response"][row])
            raise ValueError(f"sample {batch.ids[row]!r}: {name} has {has} values for {tokens} response tokens")

    if KEPT[0] in batch.columns:
        _check_kept(batch)
    if ROUTING in batch.columns:
        tokens_B = lengths["prompt"] + lengths["response"]
        for row in (lengths[ROUTING] != tokens_B - 1).nonzero().flatten().tolist():
            has, tokens = int(lengths[ROUTING][row]), int(tokens_B[row])
            raise ValueError(
                f"sample {batch.ids[row]!r}: {ROUTING} has {has} rows; expected one less than {tokens} tokens"
            )

    def column(name: str) -> torch.Tensor | None:
        return batch[name].buffer if name in batch.columns else None

    routing = column(ROUTING)
    if routing is not None and layers is not None and len(routing):
        routing = routing[:, layers.start : layers.stop]
    return Sequences.from_packed(
        lengths["prompt"],
        lengths["response"],
        prompts=column("prompt"),
        responses=column("response"),
        advantages=column("advantage"),
        behaviour_logprobs=column("behaviour_logprobs"),
        ref_logprobs=column(REFERENCE),
        versions=column("versions"),
        sampled=column(SAMPLED),
        shares=column(SHARE),
        kept_counts=column(KEPT[0]),
        kept_ids=column(KEPT[1]),
        routing=routing,
    )


def _check_kept(batch: PackedBatch) -> None:
    response, counts, ids = (batch[name].buffer for name in (*LABELS, *KEPT))
    rows = torch.arange(len(response)).repeat_interleave(counts.to(torch.int64))
    if len(rows) != len(ids):
        raise ValueError(f"{KEPT[1]} has {len(ids)} ids; expected {len(rows)}, the sum of {KEPT[0]}")
    among = torch.zeros(len(response), dtype=torch.bool)
    among[rows[ids == response[rows]]] = True
    for token in (~among & (counts > 0)).nonzero()[:1].flatten().tolist():
        offsets = batch[LABELS[0]].offsets
        assert offsets is not None
        sample = int(torch.searchsorted(offsets, token, right=True)) - 1
        raise ValueError(f"sample {batch.ids[sample]!r}: {KEPT[1]} lacks a sampled token")


def tokens_of_samples(batch: PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of each sample's prompt and response, int64 [L] each."""
    prompts, responses = (batch[name].buffer.split(batch[name].lengths().tolist()) for name in TOKENS)
    return list(zip(prompts, responses, strict=True))


def summed_log_ratios(sequences: Sequences, ref_logprobs_N: torch.Tensor) -> list[float]:
    """Sum behaviour_logprobs - ``ref_logprobs_N`` over each sample's trained tokens."""
    behaviour_N = sequences.behaviour_logprobs
    assert behaviour_N is not None
    ratios = (behaviour_N - ref_logprobs_N).where(sequences.loss_mask, 0.0).to(torch.float64)
    return [float(part.sum()) for part in ratios.split(sequences.lengths)]


def response_column(values_N: torch.Tensor, sequences: Sequences, received: Received) -> Column:
    """Pack a per-token result of ``sequences``, which are `to_sequences(received)`, as a column of the queue: each
    sample's values at its response tokens. On a rank that has received the responses."""
    of_response = response_rows(received.lengths["prompt"], received.lengths["response"])
    return Column(values_N[of_response], received.batch["response"].offsets)
