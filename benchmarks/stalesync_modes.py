"""One mode of `benchmarks/stalesync.py`: a run as a user starts it, ended after some steps, and its figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARDS = 8
STEPS = 6
"""That are measured, behind a warm-up"""
WAIT_S = 420


@dataclass(frozen=True)
class Mode:
    fusion: str
    staleness: int
    generating: int | None = None
    """Cards that only generate"""

    @classmethod
    def parse(cls, text: str) -> Mode:
        fusion, staleness, *cards = text.split(":")
        return cls(fusion, int(staleness), int(cards[0]) if cards else None)

    @property
    def warm(self) -> int:
        """Steps that are not measured. Engines that go on tell what they did whenever they adopt weights, so the second
        step's figures hold some of the first's."""
        return 2 if self.staleness else 1

    def __str__(self) -> str:
        cards = "" if self.generating is None else f", {self.generating} cards only generate"
        return f"{self.fusion} s={self.staleness}{cards}"


@dataclass(frozen=True)
class Workload:
    """Of a step, in tokens of the run; one stands for `tokens` modelled ones, a second for `speed`."""

    training: float
    prompts: int = 64
    group: int = 8
    median: int = 8
    cap: int = 68
    sequences: int = 8
    """That a card decodes at a time"""
    tokens: int = 128
    speed: float = 96.0
    model: str = "olmoe_7b"
    hardware: str = "ascend_910c"

    @property
    def pace(self) -> str:
        of = f"a token stands for {self.tokens}, a second for {self.speed:g}"
        return f"{CARDS} dies {self.hardware} under {self.model}; {of}; training counts {self.training:g} times"

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
    """Sums over the measured steps, in seconds and tokens of the run; of work, over all cards."""

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
        """A step's seconds in which cards train, all at once."""
        return self.work("modelled", "train", "optimizer") / len(self.rows) / self.training_cards

    @property
    def training_cards(self) -> int:
        return CARDS - (self.mode.generating or 0)

    @property
    def generation_s(self) -> float:
        """A step's modelled work in full batches, of one card; so is `training_s`."""
        return self.work("ideal", "decode", "prefill") / len(self.rows)

    @property
    def training_s(self) -> float:
        return self.work("ideal", "train", "optimizer") / len(self.rows)

    @property
    def tokens(self) -> float:
        return self.sum("perf/total_num_tokens")

    @property
    def overrun(self) -> float:
        paced = self.all_of("modelled") + self.sum("pace/waited_s")
        return self.all_of("overrun") / paced if paced else 0.0

    def bound_s(self, once: Figures) -> float:
        """Seconds of all modelled work spread over all cards. ``once``: a run in which every prompt was prefilled once
        and no more."""
        decoded = self.work("ideal", "decode") / self.sum("rollout/generated_tokens")
        trained = sum(row["response_length/mean"] * self.workload.prompts * self.workload.group for row in self.rows)
        prefill = once.work("ideal", "prefill") / once.tokens * self.tokens
        return (decoded * trained + prefill + self.work("ideal", "train", "optimizer")) / CARDS

    def lost(self) -> dict[str, float]:
        """Parts of the cards' time that were no work of full batches."""
        time_s = CARDS * self.wall_s
        found = {
            "underfilled_decode": self.work("modelled", "decode") - self.work("ideal", "decode"),
            "switch": self.work("modelled", "switch", "adopt", "onload", "kv"),
            "waited": self.sum("pace/waited_s"),
            "overrun": self.all_of("overrun"),
        }
        found["between_stages"] = time_s - self.all_of("ideal") - sum(found.values())
        return {name: seconds / time_s for name, seconds in found.items()}

    def as_dict(self, once: Figures) -> dict[str, Any]:
        """``suspended`` counts samples that had tokens and had to wait: their engine stopped, or new weights came to it
        and they were prefilled again."""
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
        found = self.as_dict(self)
        names = {"tokens_per_s": ".0f", "ratio_to_bound": ".3f", "utilisation": ".3f", "pace_overrun": ".1%"}
        told = ", ".join(f"{name} {found[name]:{how}}" for name, how in names.items())
        lost = ", ".join(f"{name} {part:.1%}" for name, part in found["lost"].items())
        return f"{self.mode}: {told}; a step {self.step_s:.2f} s of the run; lost: {lost}"


def make_model(folder: Path) -> None:
    """A model of next to nothing, with a tokenizer: what it computes costs as little as it can."""
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


def run(mode: Mode, workload: Workload, folder: Path) -> Figures:
    """Starts the run in ``folder``, waits for its steps, and ends it."""
    home = folder / f"{mode.fusion}-{mode.staleness}-{mode.generating or CARDS}-{workload.training:g}"
    command = [sys.executable, "scripts/train.py", f"model.path={folder / 'model'}", f"run.dir={home}"]
    command += [*workload.overrides(), f"fusion={mode.fusion}", f"stalesync.max_staleness={mode.staleness}"]
    command += [f"fusion.infer_cards={mode.generating}"] if mode.generating is not None else []
    steps = mode.warm + STEPS
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = home.with_suffix(".log")
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
        sys.exit(f"{mode}: {len(rows)} steps in {WAIT_S} s\n{log.read_text()[-3000:]}")
    return Figures(mode, workload, rows[mode.warm : steps])


def _rows(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
