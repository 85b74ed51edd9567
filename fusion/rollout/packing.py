"""Pack the engine's outputs as rows of the queue.

finished samples   prompt, response, behaviour_logprobs, versions, text, routing     the last two if configured
answers            prompt, response                                                  read by id: no task gets them
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distqueue import PackedBatch
from fusion.inference import Output

TEXT = "text"
"""Column of the response's text; what the task that rewards samples reads of them."""

ROUTING = "routing"
"""Column of the experts that each token was routed to, in every layer; only where the trainer replays them."""


def pack_outputs(outputs: Sequence[Output], texts: Sequence[str] = ()) -> PackedBatch:
    """Packs finished samples, one row each.

    Columns: `prompt` and `response` int64 [L], `behaviour_logprobs` float32 [L], `versions` int32 [L]; `text` (UTF-8),
    where the responses' ``texts`` are given; `routing` [T, layers, k] of a small integer dtype, where outputs have one
    (`Output.routing`: of every token of prompt and response but the last).
    """
    optional = {TEXT: list(texts)} if texts else {}
    routing = {ROUTING: [output.routing for output in outputs]} if outputs[0].routing is not None else {}
    return PackedBatch.from_samples(
        [output.request_id for output in outputs],
        {
            **_token_columns(outputs),
            "behaviour_logprobs": [torch.tensor(output.logprobs, dtype=torch.float32) for output in outputs],
            "versions": [torch.tensor(output.versions, dtype=torch.int32) for output in outputs],
            **optional,
            **routing,
        },
        groups=[output.group for output in outputs],
        versions=[(min(output.versions, default=0), max(output.versions, default=0)) for output in outputs],
    )


def pack_answers(outputs: Sequence[Output], rows: Sequence[str]) -> PackedBatch:
    """Packs responses that are not trained on under these row ids: `prompt` and `response` int64 [L]."""
    return PackedBatch.from_samples(rows, _token_columns(outputs))


def _token_columns(outputs: Sequence[Output]) -> dict[str, list[torch.Tensor]]:
    return {
        "prompt": [torch.tensor(output.prompt, dtype=torch.int64) for output in outputs],
        "response": [torch.tensor(output.tokens, dtype=torch.int64) for output in outputs],
    }
