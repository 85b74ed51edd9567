"""Packs the engine's outputs as rows of the queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distqueue import PackedBatch
from fusion.inference import Output

ROUTING = "routing"
"""Column of the experts that each token was routed to, in every layer; only where the trainer replays them."""


def pack_outputs(outputs: Sequence[Output]) -> PackedBatch:
    """One row an output: `prompt` and `response` int64 [L], `behaviour_logprobs` float32 [L], `versions` int32 [L]; and
    where outputs have one their `routing`, [T, layers, k] of a small integer dtype (`Output.routing`: of every token of
    prompt and response but the last)."""
    routing = {ROUTING: [output.routing for output in outputs]} if outputs[0].routing is not None else {}
    return PackedBatch.from_samples(
        [output.request_id for output in outputs],
        {
            "prompt": [torch.tensor(output.prompt, dtype=torch.int64) for output in outputs],
            "response": [torch.tensor(output.tokens, dtype=torch.int64) for output in outputs],
            "behaviour_logprobs": [torch.tensor(output.logprobs, dtype=torch.float32) for output in outputs],
            "versions": [torch.tensor(output.versions, dtype=torch.int32) for output in outputs],
            **routing,
        },
        groups=[output.group for output in outputs],
        versions=[(min(output.versions, default=0), max(output.versions, default=0)) for output in outputs],
    )
