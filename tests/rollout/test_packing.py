"""Rows of the queue contain what the engine has returned."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference import Output
from fusion.rollout.packing import pack_outputs


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5))
def test_a_row_has_the_tokens_and_the_versions_of_its_oldest_and_newest_token(responses):
    outputs = [
        Output(
            str(row),
            f"g{row}",
            (row, 7),
            tokens=list(range(len(versions))),
            logprobs=[-version / 3 for version in versions],
            versions=versions,
            finish_reason="length" if row % 2 else "stop",
        )
        for row, versions in enumerate(responses)
    ]
    batch = pack_outputs(outputs, [f"text {row}" for row in range(len(outputs))])
    spans = tuple((min(versions, default=0), max(versions, default=0)) for versions in responses)
    assert batch.versions == spans and batch.groups == tuple(output.group for output in outputs)
    for row, output in enumerate(outputs):
        assert batch["prompt"][row].tolist() == [row, 7] and batch["response"][row].tolist() == output.tokens
        assert batch["versions"][row].tolist() == output.versions and batch["text"][row] == f"text {row}"
        assert bool(batch["cut"][row]) == row % 2
        assert batch["behaviour_logprobs"][row].equal(torch.tensor(output.logprobs, dtype=torch.float32))
