"""Run the sides of `benchmarks/shared_prefix.py`: one model, with and without shared rows."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import torch

from benchmarks.harness import Figures, in_turns, medians, progress, timed
from benchmarks.lora_sides import randomise
from benchmarks.switch_sides import moe_of
from fusion.model import Mesh, Transformer
from fusion.npu import Device, open_device
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.objective import SHARED
from tests.training.sequences import sequences_of

GROUP, SHORT_ANSWER, SHORT_PROMPT = 8, 64, 16
TOKEN_BUDGET, CAPACITY_BYTES = 2304, 4 << 30
"""Of both sides: two whole sequences of the long prompt, or all that share it"""


def measure(args: Namespace) -> Figures:
    """Measure both shapes of a group."""
    device = open_device("emulated", capacity_bytes=CAPACITY_BYTES)
    model = Transformer(moe_of(args), Mesh.single(), device, bucket_bytes=16 << 20)
    randomise(model)
    settings = TrainingConfig(token_budget=TOKEN_BUDGET, load_balancing_coef=0.0)
    engine = EmbeddedTrainEngine(model, model.mesh, device, settings)
    shapes = {"n8": (args.long, SHORT_ANSWER), "short": (SHORT_PROMPT, args.answer)}
    figures: Figures = {}
    for name, (prompt, answer) in shapes.items():
        figures[name] = _compare(engine, device, _group(prompt, answer), args.rounds)
        progress(name, figures[name])
    return figures


def _compare(engine: EmbeddedTrainEngine, device: Device, batch: Sequences, rounds: int) -> Figures:
    found: Figures = {"floor": 1.0, "shared_rows_share": 0.0}

    def side(share: str) -> Callable[[int], float]:
        def run(round: int) -> float:
            engine.config.share_prefixes = share

            def work() -> None:
                metrics = engine.forward_backward(batch, cross_entropy)
                if SHARED in metrics:
                    found.update(floor=1 / (1 - metrics[SHARED]), shared_rows_share=metrics[SHARED])

            return timed(work, device=device)

        return run

    seconds = medians(in_turns({share: side(share) for share in ("off", "auto")}, rounds), "_s")
    return {"ratio": seconds["off_s"] / seconds["auto_s"], **found, **seconds}


def _group(prompt: int, answer: int) -> Sequences:
    random = torch.Generator().manual_seed(0)
    shared = torch.randint(2, 1000, (prompt,), generator=random).tolist()
    responses = [torch.randint(2, 1000, (answer,), generator=random).tolist() for _ in range(GROUP)]
    return sequences_of([shared] * GROUP, responses)
