"""Run one mode of `benchmarks/stalesync.py` as a user would, stop it after some steps, and compute its figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARDS = 8
STEPS = 6
"""Measured steps, after a warm-up."""
WAIT_S = 420
"""Seconds within which a run must finish its steps."""


@dataclass(frozen=True)
class Mode:
    fusion: str
    staleness: int
    generating: int | None = None
    """Cards that only generate."""

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse `deployment:bound[:cards]`."""
        fusion, staleness, *cards = text.split(":")
        return cls(fusion, int(staleness), int(cards[0]) if cards else None)

    @property
    def warm(self) -> int:
        """Number of warm-up steps, which are not measured.

        With staleness, an engine reports its work when it adopts weights, so the second step's figures include some of
        the first's.
        """
        return 2 if self.staleness else 1

    def __str__(self) -> str:
        cards = "" if self.generating is None else f", {self.generating} cards only generate"
        return f"{self.fusion} s={self.staleness}{cards}"


@dataclass(frozen=True)
class Workload:
    """The work of a step. A token of the run represents `tokens` modelled ones, a second `speed` modelled ones."""

    training: float
    """Factor by which the modelled cost of training is multiplied."""
    prompts: int = 64
    group: int = 8
    median: int = 8
    """Median response length, in tokens of the run; at most `cap`."""
    cap: int = 68
    sequences: int = 8
    """Sequences that a card decodes at a time."""
    tokens: int = 128
    speed: float = 96.0
    model: str = "olmoe_7b"
    hardware: str = "ascend_910c"

    @property
    def pace(self) -> str:
        scale = f"a token represents {self.tokens} modelled tokens, a second {self.speed:g} modelled seconds"
        return f"{CARDS} dies {self.hardware} under {self.model}; {scale}; training counts {self.training:g} times"

    def overrides(self) -> list[str]:
        return [
            *("device=paced", f"device.pace={self.model}", f"device.pace_tokens={self.tokens}"),
            *(f"device.pace_speed={self.speed}", f"device.pace_training={self.training}"),
            *(f"cluster.hardware={self.hardware}", f"cluster.npus={CARDS}", "cluster.stage_timeout_s=300"),
            *("data=addition", "data.max_prompt_length=8", f"data.prompts_per_step={self.prompts}"),
            *(f"algorithm.group_size={self.group}", f"rollout.max_response_length={self.cap}"),
            *(f"rollout.forced_median={self.median}", f"rollout.max_seqs={self.sequences}"),
            *("run.eval_prompts=0", "run.steps=1000", "run.name=run"),
        ]


@dataclass(frozen=True)
class Figures:
    """Sums the metrics of the measured steps, in seconds and tokens of the run; work is summed over all cards."""

    mode: Mode
    workload: Workload
    rows: list[dict[str, float]]

    def sum(self, *names: str) -> float:
        return sum(row.get(name, 0.0) for row in self.rows for name in names)

    def work(self, name: str, *kinds: str) -> float:
        return self.sum(*(f"pace/{name}_s/{kind}" for kind in kinds))

    def all_of(self, name: str) -> float:
        return sum(value for row in self.rows for key, value in row.items() if key.startswith(f"pace/{name}_s/"))

    @property
    def wall_s(self) -> float:
        return self.sum("timing_s/step")

    @property
    def step_s(self) -> float:
        return self.wall_s / len(self.rows)

    @property
    def train_s(self) -> float:
        """Seconds per step in which the training cards train, all at once."""
        return self.work("modelled", "train", "optimizer") / len(self.rows) / self.training_cards

    @property
    def training_cards(self) -> int:
        return CARDS - (self.mode.generating or 0)

    @property
    def generation_s(self) -> float:
        """Modelled work of generation per step, in full batches, in seconds of one card."""
        return self.work("ideal", "decode", "prefill") / len(self.rows)

    @property
    def training_s(self) -> float:
        """Modelled work of training per step, in seconds of one card."""
        return self.work("ideal", "train", "optimizer") / len(self.rows)

    @property
    def tokens(self) -> float:
        return self.sum("perf/total_num_tokens")

    @property
    def overrun(self) -> float:
        paced = self.all_of("modelled") + self.sum("pace/waited_s")
        return self.all_of("overrun") / paced if paced else 0.0

    def bound_s(self, once: Figures) -> float:
        """Compute the seconds of all modelled work if it were spread over all cards.

        ``once``: figures of a run in which every prompt was prefilled exactly once.
        """
        decoded = self.work("ideal", "decode") / self.sum("rollout/generated_tokens")
        trained = sum(row["response_length/mean"] * self.workload.prompts * self.workload.group for row in self.rows)
        prefill = once.work("ideal", "prefill") / once.tokens * self.tokens
        return (decoded * trained + prefill + self.work("ideal", "train", "optimizer")) / CARDS

    def lost(self) -> dict[str, float]:
        """Return the shares of the cards' time that were not spent on work in full batches."""
        time_s = CARDS * self.wall_s
        lost_s = {
            "underfilled_decode": self.work("modelled", "decode") - self.work("ideal", "decode"),
            "switch": self.work("modelled", "switch", "adopt", "onload", "kv"),
            "waited": self.sum("pace/waited_s"),
            "overrun": self.all_of("overrun"),
        }
        lost_s["between_stages"] = time_s - self.all_of("ideal") - sum(lost_s.values())
        return {name: seconds / time_s for name, seconds in lost_s.items()}

    def as_dict(self, once: Figures) -> dict[str, Any]:
        """Return the figures of the JSON, in modelled seconds and tokens.

        ``suspended`` counts samples that had tokens and had to wait: their engine stopped, or it adopted new weights
        and prefilled them again.
        """
        speed, rate = self.workload.speed, self.workload.tokens / self.workload.speed
        bound_s = self.bound_s(once)
        lags = range(self.mode.staleness + 3)
        return {
            "mode": str(self.mode),
            "tokens_per_s": self.tokens / self.wall_s * rate,
            "bound_tokens_per_s": self.tokens / bound_s * rate,
            "ratio_to_bound": bound_s / self.wall_s,
            "utilisation": self.all_of("ideal") / (CARDS * self.wall_s),
            "lost": self.lost(),
            "step_s": self.step_s * speed,
            "tail_s": self.sum("timing_s/gen_tail") / len(self.rows) * speed,
            "switch_s": self.sum("timing_s/switch") / len(self.rows) * speed,
            "max_staleness_seen": max((lag for lag in lags if self.sum(f"staleness/lag_{lag}_count")), default=0),
            "suspended": int(self.sum("rollout/suspended_total", "rollout/interrupted")),
            "mixed": int(self.sum("staleness/mixed_versions_count")),
            "pace_overrun": self.overrun,
        }

    def __str__(self) -> str:
        figures = self.as_dict(self)
        formats = {"tokens_per_s": ".0f", "ratio_to_bound": ".3f", "utilisation": ".3f", "pace_overrun": ".1%"}
        listed = ", ".join(f"{name} {figures[name]:{spec}}" for name, spec in formats.items())
        lost = ", ".join(f"{name} {share:.1%}" for name, share in figures["lost"].items())
        return f"{self.mode}: {listed}; a step takes {self.step_s:.2f} s of the run; lost: {lost}"


def make_model(folder: Path) -> None:
    """Save a minimal model with its tokenizer to ``folder``: its computation costs as little as possible."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from stalesync.prompts import make_tokenizer

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
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
    Qwen3ForCausalLM(shape).save_pretrained(folder)


def new_home(folder: Path, mode: Mode, workload: Workload) -> Path:
    """Return a path in ``folder`` that no earlier run has, not even one of the same mode."""
    number = len(list(folder.glob(log_of(Path("*")).name)))
    return folder / f"{number}-{mode.fusion}-{mode.staleness}-{mode.generating or CARDS}-{workload.training:g}"


def log_of(home: Path) -> Path:
    return home.with_name(f"{home.name}.log")


def run(mode: Mode, workload: Workload, folder: Path, measured: int = STEPS, overrides: Sequence[str] = ()) -> Figures:
    """Start the run in ``folder``, wait until it has made its steps, and stop it. The same mode may run repeatedly.
    ``measured``: number of steps after the warm-up; ``overrides``: further ones."""
    home = new_home(folder, mode, workload)
    command = [sys.executable, "scripts/train.py", f"model.path={folder / 'model'}", f"run.dir={home}"]
    command += [*workload.overrides(), *overrides, f"fusion={mode.fusion}", f"stalesync.max_staleness={mode.staleness}"]
    command += [f"fusion.infer_cards={mode.generating}"] if mode.generating is not None else []
    steps = mode.warm + measured
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = log_of(home)
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
        rows: list[dict[str, float]] = []
        deadline = time.monotonic() + WAIT_S
        while process.poll() is None and len(rows) < steps and time.monotonic() < deadline:
            time.sleep(0.5)
            rows = _rows(home / "run" / "metrics.jsonl")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    if len(rows) < steps:
        sys.exit(f"{mode}: {len(rows)} of {steps} steps in {WAIT_S} s\n{log.read_text()[-3000:]}")
    return Figures(mode, workload, rows[mode.warm : steps])


def _rows(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
