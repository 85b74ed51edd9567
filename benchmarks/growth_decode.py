"""Measure the host's part of a decode step: scheduler, batch, noise, sampler and bookkeeping, without the model.

The engine is real; its model computes nothing: hidden states are empty, logits are a constant over few tokens. So what
is left of a step is everything but the model's own operations, the sampler's over `VOCABULARY` tokens included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks.engine_sides import SHAPE, PlainCpu
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer
from fusion.npu import open_device

VOCABULARY, PROMPT_TOKENS, BLOCK_SIZE = 8, 128, 16


class NoModel:
    """In place of the model that a step calls; the engine knows the real one's config."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.weights, self._device = model.config, model.weights, model.device.torch_device
        self._logits = torch.zeros(1, VOCABULARY, device=self._device)

    def __call__(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty(len(ids), 0, device=self._device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden), VOCABULARY)


def make_engine(kind: str, max_seqs: int) -> EmbeddedEngine:
    """Create an engine on a card of this kind ("cpu": none) that decodes ``max_seqs`` sequences at a time."""
    from transformers import Qwen3MoeConfig

    device: Any = PlainCpu() if kind == "cpu" else open_device(kind)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeConfig(**SHAPE | dict(num_hidden_layers=1)).save_pretrained(folder)
        model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device)
    config = RolloutConfig(
        max_length=1024, max_seqs=max_seqs, max_batch_tokens=1 << 18, block_size=BLOCK_SIZE, kv_fraction=0.9
    )
    engine = EmbeddedEngine(model, Mesh.single(), device, config)
    engine.allocate_kv()
    model_of_a_step: Any = NoModel(model)
    engine.forward.model = engine.forward.draw.model = model_of_a_step
    return engine


def measure(engine: EmbeddedEngine, sequences: int, steps: int = 100) -> float:
    """Return the median CPU microseconds of a step that decodes ``sequences`` sequences of 128 to 256 tokens."""
    params = SamplingParams(max_tokens=512, stop_token_ids=())
    prompts = torch.randint(2, VOCABULARY, (sequences, PROMPT_TOKENS)).tolist()
    engine.submit([Request(f"{k}", tuple(prompt), params) for k, prompt in enumerate(prompts)])
    while engine.last_step_kind != "decode":
        engine.step()
    microseconds = []
    for _ in range(steps):
        start_s = time.thread_time()
        engine.step()
        microseconds.append((time.thread_time() - start_s) * 1e6)
    assert engine.scheduler.running and len(engine.scheduler.running) == sequences
    engine.abort()
    engine.run()
    return statistics.median(microseconds)


def fit(us_by_sequences: dict[int, float]) -> tuple[float, float]:
    """Return intercept and slope of the line through the medians (Theil and Sen: the median of all pairs' slopes)."""
    points = sorted(us_by_sequences.items())
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 >= 64]
    slope = statistics.median(slopes)
    return statistics.median(y - slope * x for x, y in points), slope
