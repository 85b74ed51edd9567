"""Run the part `paced` of `benchmarks/rollout.py`: whole runs on emulated cards of modelled speed, in every order.

Every run has the same prompts, in two epochs of the same rows, and the same forced lengths; it differs only in the
order in which requests are dispatched, and in whether responses are divided into chunks. The first step is the first
epoch: a warm-up, from which `history` knows the lengths. A run's speed is that of its generation, the stage that orders
differ in.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.stalesync_modes import CARDS, Figures, Mode, Workload, run

MODE = Mode("colocated", 0)
CHUNK = 8
"""Tokens of a chunk, in tokens of the run"""

UNDIVIDED = ("rollout.order=fifo",)
DIVIDED = (f"rollout.chunk_tokens={CHUNK}", "rollout.suspended_kv=keep")
ORDERS = {
    "fifo": UNDIVIDED,
    "divided": ("rollout.order=fifo", *DIVIDED),
    "context": ("rollout.order=context", *DIVIDED),
    "least_generated": ("rollout.order=least_generated", *DIVIDED),
    "history": ("rollout.order=history", *DIVIDED),
    "oracle": ("rollout.order=oracle", *DIVIDED),
}
LENGTHS = {"spread": (0.95, 0.25, 0.0), "runaways": (0.95, 0.25, 0.01)}
"""Standard deviations of the logarithm of lengths, between rows and within a group, and the share of runaways"""

MAX_OVERRUN = 0.03


@dataclass(frozen=True)
class Rollout(Workload):
    """Engines of two cards each, EP2, that decode an eighth of a step's requests at a time."""

    training: float = 1.0
    cap: int = 96
    spread: tuple[float, float, float] = LENGTHS["runaways"]
    options: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        spread = ",".join(f"{one:g}" for one in self.spread)
        layout = ("parallel=single", "parallel.infer.ep=2", "parallel.train.ep=2")
        rows = f"data.rows={self.prompts}"
        return [*super().overrides(), *layout, rows, f"rollout.forced_spread=[{spread}]", *self.options]


def paced(args: argparse.Namespace) -> dict[str, Any]:
    """Run every order on both distributions of lengths."""
    figures: dict[str, Any] = {"workload": Rollout().pace}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_moe(folder / "model")
        for lengths, spread in LENGTHS.items():
            figures[lengths] = compared(
                {
                    order: _run(Rollout(spread=spread, options=options), folder, args.steps, f"{lengths}, {order}")
                    for order, options in ORDERS.items()
                }
            )
    return figures


def _run(workload: Rollout, folder: Path, steps: int, name: str) -> dict[str, float]:
    figures = figures_of(run(MODE, workload, folder, steps))
    shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
    print(f"paced, {name}: {shown}", flush=True)
    return figures


def figures_of(measured: Figures) -> dict[str, float]:
    """Return a run's figures, in modelled seconds and tokens: medians of its steps."""
    workload = measured.workload
    gen_s = median(row["timing_s/gen"] for row in measured.rows)
    tokens = median(row["rollout/generated_tokens"] for row in measured.rows)
    return {
        "tokens_per_s": tokens / gen_s * workload.tokens / workload.speed,
        "gen_s": gen_s * workload.speed,
        "tail_s": median(row["timing_s/gen_tail"] for row in measured.rows) * workload.speed,
        "step_s": measured.step_s * workload.speed,
        "chunks": measured.sum("rollout/chunks_total") / len(measured.rows),
        "recomputed_tokens": measured.sum("rollout/recomputed_tokens") / len(measured.rows),
        "preemptions": measured.sum("rollout/preemptions"),
        "pace_overrun": measured.overrun,
    }


def compared(by_order: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the figures of each order, with its speed over that of `oracle` and of `fifo`."""
    speed = {order: figures["tokens_per_s"] for order, figures in by_order.items()}
    return {
        order: figures
        | {"ratio_to_oracle": speed[order] / speed["oracle"], "ratio_to_fifo": speed[order] / speed["fifo"]}
        for order, figures in by_order.items()
    }


def invalid(figures: dict[str, Any]) -> list[str]:
    """Return a line for each run whose cards were late."""
    return [
        f"{lengths}, {order}: overrun {one['pace_overrun']:.1%}"
        for lengths in LENGTHS
        for order, one in figures[lengths].items()
        if one["pace_overrun"] > MAX_OVERRUN
    ]


def make_moe(folder: Path) -> None:
    """Save a minimal MoE model with its tokenizer to ``folder``: its computation costs as little as possible."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from stalesync.prompts import make_tokenizer

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_experts=CARDS,
        num_experts_per_tok=1,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)
