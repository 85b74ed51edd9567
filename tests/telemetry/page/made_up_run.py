"""A made-up run: 150 metrics, 512 groups of 8 responses and 4 samples of 16,000 characters a step, and about 100
activities of every card in a step, as many as a generation stage records at most."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fusion.telemetry import RunFolder, Span

KINDS = ("prefill", "decode", "put")
ACTIVITIES, GROUPS = 100, 512
SHOWN = """critic/rewards/mean response_length/mean actor/entropy actor/kl_loss actor/grad_norm actor/loss
perf/tokens_per_s perf/utilisation timing_s/step timing_s/gen timing_s/train timing_s/switch""".split()
"""Metrics that the page draws at once; the others when they are asked for."""
METRICS = [*SHOWN, *(f"group_{index % 12}/metric_{index}" for index in range(150 - len(SHOWN)))]


def make_run(root: Path, steps: int, cards: int) -> Path:
    """Write a made-up run; return its folder."""
    noise = random.Random(0)
    with RunFolder(root, "run") as run:
        run.write_config({"run": {"name": "run", "steps": steps}, "rollout": {"max_response_length": 16384}})
        run.open_loggers({})
        for step in range(1, steps + 1):
            run.log(step, {name: noise.gauss(0, 1) for name in METRICS})
            texts = [{"prompt": "p" * 500, "response": "x y " * 4000, "reward": noise.random()} for _ in range(4)]
            run.log_samples(step, texts)
            lengths = [[int(noise.lognormvariate(7, 0.9)) for _ in range(8)] for _ in range(GROUPS)]
            tokens: dict[str, Any] = {"prompt_tokens": [100] * GROUPS, "response_tokens": lengths}
            run.log_groups(step, map(str, range(GROUPS)), "trained", lag=noise.randrange(3), tokens=tokens)
        for card in range(cards):
            now, spans = 0, []
            for index in range(steps * ACTIVITIES):
                kind = "train" if index % ACTIVITIES == 0 else KINDS[index % 3]
                end = now + noise.randrange(10**7, 10**8)
                spans.append(Span(f"card {card}", kind, kind, now, end))
                now = end
            run.log_spans(spans)
    return run.path
