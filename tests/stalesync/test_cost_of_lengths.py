"""A token costs the host as much in a long sample as in a short one. No model computes."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.growth import on_reference
from benchmarks.harness import timed
from distqueue import LocalQueue
from fusion.inference import Output, Request, SamplingParams
from fusion.inference.blocks import BlockManager
from fusion.inference.request_columns import Requests, to_columns
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import Sequence
from fusion.rewards.math import math_answer
from fusion.rollout.drafts.history_files import write_history
from fusion.rollout.drafts.pieces import TextPiece
from fusion.rollout.drafts.suffix_index import SIBLING, SuffixIndexes
from fusion.rollout.partial_samples import PartialSamples
from tests.by_length import ROUNDS, assert_long_samples_cost_no_more

cpu_s = partial(timed, clock=time.process_time)
VOCABULARY, TURNS, DRAFTS, BLOCK = 30_000, 32, 100, 16


@pytest.mark.extended
def test_a_token_costs_as_much_in_a_long_sample(tmp_path):
    assert_long_samples_cost_no_more(lambda num_tokens: costs_of(num_tokens, tmp_path / str(num_tokens)))


def costs_of(num_tokens: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield each cost of a sample of so many tokens, by name."""
    words = zipf(num_tokens + DRAFTS)
    index = SuffixIndexes()
    number = index.new([], 1, 7)
    places = [(number, index.open(number, SIBLING))]
    index.extend(places, [words[:num_tokens]])
    yield "index_bytes_a_token", index.nbytes / num_tokens

    def draft() -> None:
        for token in words[num_tokens:]:
            index.extend(places, [[token]])
            index.draft(places, [8], [16], np.linspace(0.05, 0.95, 20), 4)

    yield "draft_us", on_reference(lambda: cpu_s(draft), ROUNDS) / DRAFTS * 1e6
    tracemalloc.start()
    running = Running(num_tokens)
    yield "running_bytes_a_token", tracemalloc.get_traced_memory()[0] / num_tokens
    tracemalloc.stop()
    works: dict[str, Callable[[], object]] = {
        "schedule": lambda: Running(num_tokens),
        "put": lambda: PartialSamples(LocalQueue(["train"])).put([output_of(words[:num_tokens])]),
        "turns": lambda: converse(words[:num_tokens]),
        "evaluated_turn": lambda: pickle.loads(pickle.dumps(Requests(to_columns([running.request])))),
        "math": lambda: math_answer("", "1 2 " * num_tokens, "12"),
    }
    for name, work in works.items():
        yield f"{name}_us_a_token", on_reference(lambda work=work: cpu_s(work), ROUNDS) / num_tokens * 1e6
    piece = TextPiece(b"p" * 32, "g", "g/0", 0, array("i", words[:num_tokens]), 0.5)
    kept_s = cpu_s(lambda: write_history(folder, 0, [piece]))
    yield "history_us_a_token", kept_s / num_tokens * 1e6
    (history,) = folder.iterdir()
    yield "history_bytes_a_token", history.stat().st_size / num_tokens


class Running:
    """A request of an engine that decodes all of its tokens; no model computes."""

    def __init__(self, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens)
        scheduler = Scheduler(BlockManager(num_tokens // BLOCK + 2, BLOCK), max_seqs=1, max_batch_tokens=4096)
        self.sequence = Sequence.of(Request("g/0", (1, 2, 3), params), params, ())
        scheduler.add(self.sequence)
        for number in range(num_tokens):
            step = scheduler.schedule()
            scheduler.commit(step, [1000 + number % VOCABULARY], [-0.5 - number])

    @property
    def request(self) -> Request:
        """The request with the tokens that it has, as an evaluation sends it again after a turn."""
        return replace(self.sequence.request, response=tuple(self.sequence.tokens[3:]))


def converse(tokens: list[int]) -> None:
    """Put and restore a conversation of `TURNS` turns."""
    partials, earlier, before = PartialSamples(LocalQueue(["train"]), caches=True, turns=True), "", ()
    size = len(tokens) // TURNS
    for turn in range(TURNS):
        said = output_of(tokens[turn * size : (turn + 1) * size], sampled=True)
        (suspended,) = partials.put([], [replace(said, before=before, earlier=earlier, finish_reason="turn")])
        earlier = suspended.earlier
        (resumed,) = partials.restore([Request("g/0", (1, 2, 3), group="g", earlier=earlier, turns=True)])
        before = resumed.response


def output_of(tokens: list[int], sampled: bool = False) -> Output:
    """Return what an engine has sampled of a response."""
    count = len(tokens)
    columns = dict(logprobs=[-0.5] * count, versions=[3] * count, sampled=[True] * count if sampled else [])
    return Output("g/0", "g", (1, 2, 3), tokens, **columns)  # type: ignore[arg-type]


def zipf(num_tokens: int) -> list[int]:
    """Return a text in which few tokens are frequent, and are followed by ever more others."""
    ranks = np.random.default_rng(0).zipf(1.2, num_tokens)
    return np.minimum(ranks, VOCABULARY).tolist()
