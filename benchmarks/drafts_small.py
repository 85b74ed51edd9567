"""Run the part `small` of `benchmarks/drafts.py`: a model so small that its steps take about a millisecond."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.drafts_sides import HostMemory, long_answer_model
from benchmarks.rotation import in_rotation
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.model import Transformer
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.native import NativeIndexes
from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

PROMPTS, GROUP, EPOCHS = 64, 8, 3
CASES = {"8": (8, 1.0), "64": (64, 1.0), "64_unlike": (64, 4.0)}
"""Sequences that decode at a time, and the temperature: at 4 no text repeats"""


def small(args: argparse.Namespace) -> dict[str, Any]:
    """Generate three epochs of long answers with drafts and a probe, and without, in turns."""
    model, figures = long_answer_model(args), {}
    for name, (live, temperature) in CASES.items():
        best: dict[str, list[float]] = {side: [0.0] * EPOCHS for side in ("drafts", "plain")}
        for round_ in range(args.rounds):
            for side in in_rotation(list(best), round_):
                rates = _rates(model, live, temperature, drafts=side == "drafts")
                best[side] = [max(pair) for pair in zip(best[side], rates, strict=True)]
        ratios = [drafts / plain for drafts, plain in zip(best["drafts"], best["plain"], strict=True)]
        figures[name] = {"ratio": min(ratios), "by_epoch": ratios}
        said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"small, {live:3} live, temperature {temperature:.0f}: {said} x in three epochs", flush=True)
    return figures


def _rates(model: Transformer, live: int, temperature: float, drafts: bool) -> list[float]:
    """Return tokens a CPU second in each epoch."""
    config = RolloutConfig(max_length=512, max_seqs=live)
    drafter = TextDrafter(NativeIndexes()) if drafts else None
    engine = EmbeddedEngine(model, model.mesh, HostMemory(), config=config, drafter=drafter)
    engine.allocate_kv()
    data = DataConfig(source="worked_arithmetic", rows=PROMPTS, prompts_per_step=PROMPTS)
    source, rates = PromptSource(data, make_tokenizer(), seed=0), []
    params = SamplingParams(max_tokens=96, temperature=temperature)
    for _ in range(EPOCHS):
        engine.submit(
            Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id, priority=int(drafts and i > 0))
            for prompt in source.next()
            for i in range(GROUP)
        )
        before, start_s = engine.scheduler.counters.generated_tokens, time.thread_time()
        engine.run()
        rates.append((engine.scheduler.counters.generated_tokens - before) / (time.thread_time() - start_s))
    return rates
