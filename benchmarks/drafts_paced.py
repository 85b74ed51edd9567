"""Run the part `paced` of `benchmarks/drafts.py`: whole runs on emulated cards of modelled speed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stalesync_modes import CARDS, ROOT, Figures, Mode, Workload, run

MODE = Mode("colocated", 0)
EPOCHS = {"first": slice(0, 3), "second": slice(3, 5)}
"""Measured steps of each epoch"""
MEASURED = 5
MAX_OVERRUN = 0.03
"""Of a step; above it the step is left out"""

SIDES = {
    "none": ("rollout.drafts=none",),
    "drafts": ("rollout.drafts=both", "rollout.probe=0"),
    "probe": ("rollout.drafts=both", "rollout.probe=1"),
}
Row = Mapping[str, float]


@dataclass(frozen=True)
class LongAnswers(Workload):
    """Sampled long answers: their lengths, and how often a draft is right, are those of the policy."""

    training: float = 1.0
    cap: int = 96
    sequences: int = 16
    tokens: int = 16
    speed: float = 4.8
    options: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        rows = self.prompts * (MODE.warm + EPOCHS["first"].stop)
        return [
            *("device=paced", f"device.pace={self.model}", f"device.pace_tokens={self.tokens}"),
            *(f"device.pace_speed={self.speed}", f"device.pace_training={self.training}"),
            *(f"cluster.hardware={self.hardware}", f"cluster.npus={CARDS}", "cluster.stage_timeout_s=300"),
            *("data=worked", "data.max_prompt_length=64", f"data.rows={rows}", f"data.prompts_per_step={self.prompts}"),
            *(f"algorithm.group_size={self.group}", f"rollout.max_response_length={self.cap}"),
            *(f"rollout.max_seqs={self.sequences}", "training.lr=1e-4", "reward=arithmetic"),
            *("run.eval_prompts=0", "run.steps=1000", "run.name=run", *self.options),
        ]


def paced(args: argparse.Namespace) -> dict[str, Any]:
    """Run the same steps without drafts, with drafts, and with a probe in every group. As drafts change no sample, a
    step is the same work on every side; steps in which a card was late on any side are left out on all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model is not None:
            shutil.copytree(args.model, folder / "model")
        else:
            make_base = [sys.executable, "scripts/make_base.py", "worked_arithmetic", str(folder / "model")]
            subprocess.run(make_base, cwd=ROOT, check=True)
        rows_by_side = {}
        for side, options in SIDES.items():
            rows_by_side[side] = run(MODE, LongAnswers(options=options), folder, MEASURED).rows
            print(f"paced, {side:6}: {figures_of(rows_by_side[side])}", flush=True)
    figures = compared(rows_by_side) | {"workload": LongAnswers().pace}
    for epoch in ("first", "second"):
        if epoch in figures:
            steps, tails = (
                ", ".join(f"{figures[epoch][side][key]:.0f}" for side in SIDES) for key in ("step_s", "tail_s")
            )
            print(f"paced, {epoch} epoch, seconds of {', '.join(SIDES)}: a step {steps}; its tail {tails}")
    return figures


def compared(rows_by_side: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return the figures of each side, over all steps that are valid and over those of each epoch, and how much shorter
    steps and tails are with a probe than without drafts."""
    overruns = [max(figures_of([row])["overrun"] for row in rows) for rows in zip(*rows_by_side.values(), strict=True)]
    valid = [step for step, overrun in enumerate(overruns) if overrun <= MAX_OVERRUN]
    figures: dict[str, Any] = {"steps": len(valid)}
    for epoch, steps in {"all": slice(None), **EPOCHS}.items():
        chosen = [step for step in range(len(overruns))[steps] if step in valid]
        if not chosen:
            continue
        sides = {side: figures_of([rows[step] for step in chosen]) for side, rows in rows_by_side.items()}
        none, probe = sides["none"], sides["probe"]
        found = {
            **sides,
            "ratio": none["step_s"] / probe["step_s"],
            "tail_cut": 1 - probe["tail_s"] / none["tail_s"],
            "ratio_without_probe": none["step_s"] / sides["drafts"]["step_s"],
        }
        figures |= found if epoch == "all" else {epoch: found}
    return figures


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return means over steps; seconds are modelled ones, tokens those of the run."""
    workload = LongAnswers()
    figures = Figures(MODE, workload, [dict(row) for row in rows])

    def mean(*names: str) -> float:
        return figures.sum(*names) / len(rows)

    return {
        "step_s": figures.step_s * workload.speed,
        "generation_s": mean("timing_s/gen") * workload.speed,
        "tail_s": mean("timing_s/gen_tail") * workload.speed,
        "decode_s_of_a_card": figures.work("modelled", "decode") / len(rows) / CARDS * workload.speed,
        "tokens_per_forward": mean("rollout/tokens_per_forward_mean"),
        "response_tokens": mean("response_length/mean"),
        "overrun": figures.overrun,
    }
