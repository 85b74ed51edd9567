"""Pack the engine's outputs as rows of the queue.

finished samples   prompt, response, behaviour_logprobs, versions, cut; if configured text, kept_*, routing;
                   of conversations sampled, sampled_tokens
ended branches     the same without cut, text and sampled_tokens, so that no reward is asked for them
answers            prompt, response                                                  read by id: no task gets them
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distqueue import Column, PackedBatch
from fusion.inference import Output

TEXT = "text"
"""Column of the response's text; what the task that rewards samples reads of them."""
CUT = "cut"
"""Column of bool: whether the limit of tokens ended the response, not an end token or a stop string."""
ROUTING = "routing"
"""Column of the experts that each token was routed to, in every layer; only where the trainer replays them."""
KEPT = ("kept_counts", "kept_ids")
"""Columns of the ids that truncated sampling kept for each token: int32 [L], their number, and int32 [their sum], the
ids; only where the rollouts' sampling truncates"""
SAMPLED, SAMPLED_TOKENS = "sampled", "sampled_tokens"
"""Columns of what the policy has sampled of a response, bool [L], and of the number of these tokens: the others are
observations. Only of conversations (`WorkerSpec.turns`); without them all tokens of a response were sampled"""
SHARE = "share"
"""Column of a row's share in its conversation, float32: 1 / branches. Only of conversations; put with the advantages"""


class GeneratedNames(NamedTuple):
    """Names of the columns of what was generated: tokens int64 [L], their logprobs float32 [L] and policy versions
    int32 [L]; where engines record them, kept ids (`KEPT`) and routing; of conversations `SAMPLED`."""

    tokens: str
    logprobs: str
    versions: str
    kept: tuple[str, str]
    routing: str
    sampled: str


GENERATED = GeneratedNames("response", "behaviour_logprobs", "versions", KEPT, ROUTING, SAMPLED)


def pack_outputs(outputs: Sequence[Output], texts: Sequence[str] = ()) -> PackedBatch:
    """Pack finished samples, one row each. Columns: `prompt` and `response` int64 [L], `behaviour_logprobs` float32
    [L], `versions` int32 [L], `cut` bool; `text` (UTF-8), where the responses' ``texts`` are given; those of `KEPT`,
    where outputs have them; `routing` [T, layers, k] of a small integer dtype, where outputs have one
    (`Output.routing`, of all submissions: every token of prompt and response but the last); `SAMPLED` and
    `SAMPLED_TOKENS` of conversations, whose observations have version -1 and log-probability 0. Branches whose
    conversation continues (finish reason "turn"), which are packed by themselves, are without the columns that the task
    which rewards samples reads."""
    optional: dict[str, Any] = {}
    if outputs[0].finish_reason != "turn":
        optional[CUT] = torch.tensor([output.finish_reason == "length" for output in outputs])
        optional |= {TEXT: list(texts)} if texts else {}
        if outputs[0].sampled:
            optional[SAMPLED_TOKENS] = torch.tensor([sum(output.sampled) for output in outputs])
    columns = generated_columns(outputs, GENERATED)
    return PackedBatch.from_samples(
        [output.request_id for output in outputs],
        {**_prompt_column(outputs), **columns, **optional},
        groups=[output.group for output in outputs],
        versions=_spans(columns["versions"]),
    )


def generated_columns(outputs: Sequence[Output], names: GeneratedNames) -> dict[str, Any]:
    """Return the columns of what outputs have generated, under these names."""
    first, sampled = outputs[0].routing, [output.sampled for output in outputs]
    return {
        names.tokens: Column.of_numbers([output.tokens for output in outputs], torch.int64, names.tokens),
        names.logprobs: Column.of_numbers([output.logprobs for output in outputs], torch.float32, names.logprobs),
        names.versions: Column.of_numbers([output.versions for output in outputs], torch.int32, names.versions),
        **_kept_columns(outputs, names.kept),
        **({} if first is None else {names.routing: [output.routing for output in outputs]}),
        **({names.sampled: Column.of_numbers(sampled, torch.bool, names.sampled)} if sampled[0] else {}),
    }


def _kept_columns(outputs: Sequence[Output], names: Sequence[str]) -> dict[str, Column | list[np.ndarray]]:
    """Return the columns of kept ids under these two names; {} where no token has any."""
    if not any(output.kept_counts for output in outputs):
        return {}
    counts = Column.of_numbers([output.kept_counts for output in outputs], torch.int32, names[0])
    ids = [np.frombuffer(bytearray(output.kept_ids), np.int32) for output in outputs]
    return dict(zip(names, (counts, ids), strict=True))


def _spans(versions: Column) -> list[tuple[int, int]]:
    """Return the policy versions of each sample's oldest and newest sampled token; (0, 0) where there is none."""
    assert versions.offsets is not None
    starts, ends = versions.offsets[:-1].numpy(), versions.offsets[1:].numpy()
    spans = np.zeros((len(starts), 2), np.int64)
    if (has_tokens := starts < ends).any():
        newest = versions.buffer.numpy()
        oldest = newest.view(np.uint32)  # the -1 of an observation is the highest
        for side, (extreme, values) in enumerate(((np.minimum, oldest), (np.maximum, newest))):
            spans[has_tokens, side] = extreme.reduceat(values, starts[has_tokens])
    return [(first, last) for first, last in spans.tolist()]


def pack_answers(outputs: Sequence[Output], rows: Sequence[str]) -> PackedBatch:
    """Pack responses that are not trained on under these row ids: `prompt` and `response` int64 [L]."""
    tokens = Column.of_numbers([[*output.before, *output.tokens] for output in outputs], torch.int64, "response")
    return PackedBatch.from_samples(rows, {**_prompt_column(outputs), "response": tokens})


def _prompt_column(outputs: Sequence[Output]) -> dict[str, Column]:
    return {"prompt": Column.of_numbers([output.prompt for output in outputs], torch.int64, "prompt")}
