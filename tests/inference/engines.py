"""Engines on the tiny model, and the same requests put to them in different ways."""

from __future__ import annotations

import gc
import random
import tempfile
from dataclasses import replace
from functools import cache

import torch

from fusion.inference import EmbeddedEngine, Output, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.npu import open_device
from tests.helpers import tiny_checkpoint
from tests.rollouts import rollout_config

OPERATORS = [
    ("fused", torch.float32),
    ("composed", torch.float32),
    ("composed", torch.float64),
    ("composed", torch.bfloat16),
]
"""The fixture `operators` for each dtype: only float32 is fused"""


@cache
def checkpoint(experts: bool = True) -> str:
    return tiny_checkpoint(tempfile.mkdtemp(), experts)


@cache
def card():
    return open_device("emulated", capacity_bytes=2 << 30)  # whatever other tests of this process gave it


def empty_card():
    """The card. Engines of earlier tests that are in reference cycles hold its memory until garbage is collected."""
    if card().memory().free < card().memory().capacity // 2:
        gc.collect()
    return card()


@cache
def model(
    dtype: torch.dtype = torch.float32, invariant: bool = False, experts: bool = True, folder: str | None = None
) -> Transformer:
    folder = folder or checkpoint(experts)
    loaded = Transformer(ModelConfig.from_hf(folder), Mesh.single(), card(), dtype, batch_invariant=invariant)
    load_weights(loaded, folder)
    return loaded


def engine(
    dtype: torch.dtype = torch.float32,
    seed: int = 5,
    experts: bool = True,
    routing: bool = False,
    folder: str | None = None,
    **rollout,
) -> EmbeddedEngine:
    """One process, KV allocated. Small by default: allocation is not what most tests are about. ``folder``: of another
    model than the tiny one."""
    config = rollout_config(**(dict(max_length=256, max_seqs=64, max_batch_tokens=512) | rollout))
    made, mesh = model(dtype, config.engine.batch_invariant, experts, folder), Mesh.single()
    built = EmbeddedEngine(made, mesh, empty_card(), config, seed, routing)
    built.allocate_kv()
    return built


def requests(count: int = 12, max_tokens: int = 40, seed: int = 0, **params) -> list[Request]:
    """Groups of three siblings; prompts of 1 to 100 tokens."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        if i % 3 == 0:
            prompt = tuple(draw.randrange(2, 32) for _ in range((33, 100, 1, 16, 5)[i // 3 % 5]))
        made.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=max_tokens, **params), group=f"g{i // 3}"))
    return made


def by_id(outputs: list[Output]) -> dict[str, tuple[list[int], list[float]]]:
    assert len({o.request_id for o in outputs}) == len(outputs)
    return {o.request_id: (o.tokens, o.logprobs) for o in outputs}


def tokens(outputs: list[Output]) -> dict[str, list[int]]:
    return {name: pair[0] for name, pair in by_id(outputs).items()}


def generate(made: EmbeddedEngine, wanted: list[Request]) -> list[Output]:
    made.submit(wanted)
    return made.run()


def generate_brokenly(
    made: EmbeddedEngine, wanted: list[Request], seed: int, collected: list[Output] | None = None
) -> dict[str, tuple[list[int], list[float]]]:
    """The same requests in random order, arriving at random steps, in chunks, aborted and resumed, KV thrown away.
    ``collected`` takes all outputs in order."""
    draw = random.Random(seed)
    todo = draw.sample(wanted, len(wanted))
    got: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in wanted}
    by_name = {r.id: r for r in wanted}
    unfinished = len(wanted)
    while unfinished:
        while todo and draw.random() < 0.6:
            made.submit([replace(todo.pop(), chunk_tokens=draw.choice((0, 1, 7)))])
        if draw.random() < 0.1:
            made.abort(draw.sample(sorted(by_name), 3))
        if draw.random() < 0.03:
            made.policy_version += 1
        outputs = made.suspend() if draw.random() < 0.03 else made.step()
        if collected is not None:
            collected += outputs
        for output in outputs:
            got[output.request_id][0].extend(output.tokens)
            got[output.request_id][1].extend(output.logprobs)
            if output.finish_reason in ("chunk", "abort"):
                todo.insert(0, replace(by_name[output.request_id], response=tuple(got[output.request_id][0])))
            else:
                unfinished -= 1
    return got
