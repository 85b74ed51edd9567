"""The host's part of a decode step is small: scheduler, batch, noise, sampler and bookkeeping. The engine is real, its
model computes nothing, so what is left of a step is everything but the model's own operations."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks.growth import on_reference
from benchmarks.harness import timed
from benchmarks.models import PlainCpu, engine_of
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, Transformer
from tests.helpers import tiny_config

VOCABULARY, PROMPT_TOKENS, STEPS, ROUNDS = 8, 128, 60, 3
SEQUENCES = (1, 8, 64, 256, 1024)


@pytest.mark.extended
def test_a_decode_step_takes_a_millisecond_of_the_host_at_64_sequences():
    torch.set_num_threads(1)
    engine = make_engine()
    us = {count: on_reference(partial(decode_us, engine, count), ROUNDS) for count in SEQUENCES}
    # Theil and Sen: the median of the slopes of all pairs
    further = [(us[y] - us[x]) / (y - x) for x in SEQUENCES for y in SEQUENCES if x < y and x >= 64]
    print(", ".join(f"{count}: {value:.0f} us" for count, value in us.items()), f"{median(further):.2f} us a sequence")
    assert us[64] <= 1000 and median(further) <= 4


class NoModel:
    """In place of the model that a step calls; the engine knows the real one's config."""

    can_hold_whole_rows = False
    """Whether small passes keep all rows on every rank: this is the only one"""

    def __init__(self, model: Transformer) -> None:
        self.config, self.weights, self._device = model.config, model.weights, model.device.torch_device
        self.head, self._logits = self, torch.zeros(1, VOCABULARY, device=self._device)

    def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(len(ids), 0, device=self._device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden), VOCABULARY)


def make_engine() -> EmbeddedEngine:
    """Create an engine that decodes the most sequences at a time."""
    device: Any = PlainCpu()
    model = Transformer(tiny_config(num_hidden_layers=1), Mesh.single(), device)
    limits = dict(max_length=1024, max_seqs=SEQUENCES[-1], max_batch_tokens=1 << 18)
    engine = engine_of(model, block_size=16, kv_fraction=0.9, **limits)
    model_of_a_step: Any = NoModel(model)
    engine.forward.model = model_of_a_step
    return engine


def decode_us(engine: EmbeddedEngine, sequences: int) -> float:
    """Return the median CPU microseconds of a step that decodes ``sequences`` sequences of 128 to 256 tokens."""
    params = SamplingParams(max_tokens=512, stop_token_ids=())
    prompts = torch.randint(2, VOCABULARY, (sequences, PROMPT_TOKENS)).tolist()
    engine.submit([Request(f"{k}", tuple(prompt), params) for k, prompt in enumerate(prompts)])
    while engine.last_step_kind != "decode":
        engine.step()
    microseconds = [timed(engine.step, time.thread_time) * 1e6 for _ in range(STEPS)]
    assert engine.scheduler.running and len(engine.scheduler.running) == sequences
    engine.abort()
    engine.run()
    return median(microseconds)
