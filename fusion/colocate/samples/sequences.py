"""The queue's columns as the trainer's sequences, and back.

queue columns ─► StageReader ─► Received ─to_sequences─► trainer Sequences ─► logprobs ─split_responses─► queue column

A stage of a pipeline holds what it looks at (`needed`): the first its tokens, the last the labels and what the loss is
made of; how long the samples are all stages know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distqueue import Column, PackedBatch
from distqueue.hierarchy import Received
from fusion.model import Mesh
from fusion.rollout.packing import ROUTING
from fusion.training import Sequences

TOKENS = ("prompt", "response")
"""What a forward pass begins with."""

LABELS = ("response",)
"""What log-probabilities are of."""

LOSS = ("behaviour_logprobs", "advantage", "versions")
"""What a loss is made of beside them; `REFERENCE` too where it has a reference."""

REFERENCE = "ref_logprobs"


def needed(mesh: Mesh, of_loss: Sequence[str] = (), of_experts: Sequence[str] = ()) -> tuple[str, ...]:
    """Columns that a rank of ``mesh`` looks at; the last stage at those ``of_loss`` beside the labels, every stage that
    has experts (all of them, or none) at those ``of_experts``."""
    first = TOKENS if mesh.first_stage else ()
    last = (*LABELS, *of_loss) if mesh.last_stage else ()
    return tuple(dict.fromkeys((*first, *last, *of_experts)))


def nothing(columns: Sequence[str]) -> Received:
    """No sample with these columns."""
    batch = PackedBatch((), {name: Column(torch.empty(0)) for name in columns})
    return Received(batch, {name: torch.empty(0, dtype=torch.int64) for name in (*TOKENS, *columns)})


def to_sequences(delivery: Received, layers: range | None = None) -> Sequences:
    """The samples as the trainer reads them, with the columns they came with; of their routing the stage's ``layers``
    (None: all).

    Raises:
        ValueError: a column has another number of values than a sample has response tokens, or `routing` another than
            it has tokens but one.
    """
    batch, lengths = delivery.batch, delivery.lengths
    for name in ("behaviour_logprobs", "versions", REFERENCE):
        if name in batch.columns and not lengths[name].equal(lengths["response"]):
            row = int((lengths[name] != lengths["response"]).nonzero()[0])
            has, tokens = int(lengths[name][row]), int(lengths["response"][row])
            raise ValueError(f"sample {batch.ids[row]!r}: {name} has {has} values for {tokens} response tokens")

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
        lengths["prompt"].tolist(),
        lengths["response"].tolist(),
        prompts=column("prompt"),
        responses=column("response"),
        advantages=column("advantage"),
        behaviour_logprobs=column("behaviour_logprobs"),
        ref_logprobs=column(REFERENCE),
        versions=column("versions"),
        routing=routing,
    )


def summed_log_ratios(sequences: Sequences, ref_logprobs_N: torch.Tensor) -> list[float]:
    """Of each sample, behaviour_logprobs - ``ref_logprobs_N`` (0 on prompts) summed over its response."""
    behaviour_N = sequences.behaviour_logprobs
    assert behaviour_N is not None
    ratios = (behaviour_N - ref_logprobs_N).to(torch.float64)
    return [float(part.sum()) for part in ratios.split(sequences.lengths)]


def split_responses(values_N: torch.Tensor, delivery: Received) -> list[torch.Tensor]:
    """A per-token column of `to_sequences(delivery)` as one tensor a sample, of its response tokens."""
    prompts, responses = (delivery.lengths[name].tolist() for name in TOKENS)
    lengths = [size for pair in zip(prompts, responses, strict=True) for size in pair]
    return list(values_N.split(lengths)[1::2])
