"""Samples between the queue's columns and what engine and trainer speak.

engine Output ─pack_outputs─► prompt, response, behaviour_logprobs, versions ─to_sequences─► trainer Sequences
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distqueue import PackedBatch
from fusion.inference import Output
from fusion.training import Sequences

READ = ("prompt", "response")
"""Columns a forward pass needs."""

TRAIN = (*READ, "behaviour_logprobs", "advantage")
"""Columns a training step needs; `REFERENCE` too where the loss has a reference."""

REFERENCE = "ref_logprobs"


def pack_outputs(outputs: Sequence[Output]) -> PackedBatch:
    """One row an output: `prompt` and `response` int64 [L], `behaviour_logprobs` float32 [L], `versions` int32 [L]."""
    return PackedBatch.from_samples(
        [output.request_id for output in outputs],
        {
            "prompt": [torch.tensor(output.prompt, dtype=torch.int64) for output in outputs],
            "response": [torch.tensor(output.tokens, dtype=torch.int64) for output in outputs],
            "behaviour_logprobs": [torch.tensor(output.logprobs, dtype=torch.float32) for output in outputs],
            "versions": [torch.tensor(output.versions, dtype=torch.int32) for output in outputs],
        },
        groups=[output.group for output in outputs],
        versions=[(min(output.versions, default=0), max(output.versions, default=0)) for output in outputs],
    )


def to_sequences(batch: PackedBatch) -> Sequences:
    """The batch as the trainer reads it, with the columns it has."""

    def column(name: str) -> list | None:
        return [batch[name][row] for row in range(len(batch))] if name in batch.columns else None

    return Sequences.from_samples(
        column("prompt") or [],
        column("response") or [],
        advantages=batch["advantage"].buffer if "advantage" in batch.columns else None,
        behaviour_logprobs=column("behaviour_logprobs"),
        ref_logprobs=column(REFERENCE),
    )


def split_responses(values_N: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
    """A per-token column of `to_sequences(batch)` as one tensor a sample, of its response tokens."""
    prompts, responses = batch["prompt"].lengths().tolist(), batch["response"].lengths().tolist()
    lengths = [size for pair in zip(prompts, responses, strict=True) for size in pair]
    return list(values_N.split(lengths)[1::2])
