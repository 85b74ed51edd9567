"""What an emulated card stands for: a card, a model, and how many of its tokens and seconds are one of the run's.

    device.pace         shape of the modelled model      ┐
    device.pace_tokens  its tokens for one of the run's  ├─► Pace ─► EngineCost, TrainerCost, SwitchCost: seconds of the
    device.pace_speed   its seconds for one of the run's │           run for a step of the run, by kind of work
    device.pace_training  how many times training counts │
    cluster.hardware    the modelled card                ┘

A real token stands for `tokens` modelled ones, in prompts, responses and contexts: a decode step of the run is so many
decode steps of the modelled engine, with contexts so many times as long. A second of the run stands for `speed`
modelled ones, so rates in modelled tokens a modelled second are those of the run x tokens / speed. With speed = tokens
a decode step of the run takes exactly as long as one of the modelled engine, and rates are the run's own.

Not modelled: how much fits into HBM (`scripts/plan.py` says that), rewards, the queue, what frozen models take on their
way to and from the host, and the KV of a chunk, which goes there beside the next steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fusion.costmodel.hardware import Figure, Hardware, hardware_named
from fusion.costmodel.layouts import misfit
from fusion.costmodel.memory import memory
from fusion.costmodel.roofline import Roofline, Work, pairs
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.costmodel.switch_time import adopt_s, to_infer, to_train
from fusion.costmodel.traffic import traffic
from fusion.ep_switch.config import FusionConfig
from fusion.inference.sequence import Step
from fusion.model import Parallel
from fusion.npu import DeviceConfig
from fusion.training.config import TrainingConfig

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"

Parts = dict[str, float]
"""Kind of work → seconds of the run."""


@dataclass(frozen=True)
class Pace:
    shape: Shape
    hardware: Hardware
    tokens: int
    speed: float
    training: float = 1.0
    """How many times an update, with its forward and backward pass, counts"""

    @classmethod
    def load(cls, device: DeviceConfig, hardware: str | None) -> Pace | None:
        """None where the device has no pace.

        Raises:
            ValueError: no such model or hardware, by key.
        """
        if device.pace is None:
            return None
        if hardware is None:
            raise ValueError(f"device.pace={device.pace}: expected cluster.hardware to say what the cards stand for")
        from fusion.costmodel.command_line import load_shape

        try:
            shape = load_shape(device.pace, SHAPES).shape
        except ValueError as error:
            raise ValueError(str(error).replace("model=", "device.pace=", 1)) from None
        return cls(shape, hardware_named(hardware), device.pace_tokens, device.pace_speed, device.pace_training)

    def __str__(self) -> str:
        of = f"a token stands for {self.tokens}, a second for {self.speed:g}"
        of += f", training counts {self.training:g} times" if self.training != 1 else ""
        return f"{self.shape.name} on {self.hardware.name}, {of}"

    def check(self, parallel: Parallel, key: str) -> None:
        """Raises:
        ValueError: the modelled model cannot be cut so; ``key`` names the layout.
        """
        if wrong := misfit(parallel, self.shape):
            raise ValueError(f"device.pace={self.shape.name} does not go with {key}: {wrong}")

    def seconds(self, modelled: float) -> float:
        return modelled / self.speed


@dataclass(frozen=True)
class EngineCost:
    """Steps of an engine of this layout. ``full``: sequences that an attention rank decodes at its best."""

    pace: Pace
    layout: Parallel
    full: int

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.pace.shape, self.pace.hardware, self.layout)

    def __call__(self, step: Step) -> tuple[Parts, Parts]:
        """Of an attention rank's step: seconds, and of those what a card that never lacks requests would take."""
        of = self.pace.tokens
        fresh = step.sampled[len(step.decodes) :]
        # Of the modelled tokens that a sequence's first token stands for, the prefill brings one, decodes the others.
        batch = len(step.decodes) + len(fresh) * (of - 1) / of
        kv = sum(seq.computed + 1 for seq in step.decodes) + sum(len(seq.tokens) for seq in fresh) * (of - 1) / of
        tokens = sum(count for _, count in step.chunks)
        attended = sum(pairs(count, seq.computed) for seq, count in step.chunks) * of
        roofline, decode, ideal = self.roofline, Work(0.0), 0.0
        if batch:
            decode = roofline.decode_step(batch, kv * of) * of
            ideal = roofline.ideal_decode_s(batch, kv * of, self.full) * of
            both = roofline.engine_step(batch, kv * of, tokens, attended) * of
            prefill = both.seconds - decode.seconds
        else:
            prefill = roofline.prefill(tokens * of, attended * of).seconds
        parts = self._told(decode.seconds, prefill)
        return parts or {"decode": 0.0}, self._told(ideal, prefill)

    def out_s(self, kv_tokens: int) -> float:
        """Seconds in which a die copies the KV of so many tokens of the run to the host."""
        return self._copy_s(kv_tokens, self.pace.hardware.out_bytes_per_s)

    def back_s(self, kv_tokens: int) -> float:
        return self._copy_s(kv_tokens, self.pace.hardware.back_bytes_per_s)

    def _copy_s(self, kv_tokens: int, bytes_per_s: Figure) -> float:
        nbytes = kv_tokens * self.pace.tokens * self.pace.shape.kv_bytes(self.layout.tp, self.layout.pp)
        return self.pace.seconds(nbytes / bytes_per_s.value)

    def _told(self, decode: float, prefill: float) -> Parts:
        found = {"decode": decode, "prefill": prefill}
        return {kind: self.pace.seconds(seconds) for kind, seconds in found.items() if seconds}


@dataclass(frozen=True)
class TrainerCost:
    """Passes over samples of a data-parallel rank, and updates. Micro-batches are those of the default budget: the
    run's own holds other tokens."""

    pace: Pace
    layout: Parallel
    recompute: bool = True

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.pace.shape, self.pace.hardware, self.layout)

    def train(self, lengths: Sequence[int]) -> Parts:
        work = self.roofline.train_step(*self._sizes(lengths), TrainingConfig().token_budget, self.recompute)
        return {"train": self.pace.seconds(work.seconds * self.pace.training)}

    def forward(self, lengths: Sequence[int], kind: str) -> Parts:
        work = self.roofline.forward(*self._sizes(lengths), TrainingConfig().token_budget)
        return {kind: self.pace.seconds(work.seconds)}

    def update(self) -> Parts:
        return {"optimizer": self.pace.seconds(self.roofline.optimizer_step().seconds * self.pace.training)}

    def _sizes(self, lengths: Sequence[int]) -> tuple[float, float]:
        modelled = [length * self.pace.tokens for length in lengths]
        return sum(modelled), sum(map(pairs, modelled))


@dataclass(frozen=True)
class SwitchCost:
    """Seconds of a switch, from the plan's own estimate; ``onload``: of the optimizer's way back, beside training;
    ``adopt``: of an engine's pause for weights that have arrived beside it."""

    infer: float
    train: float
    onload: float
    adopt: float

    @classmethod
    def of(cls, pace: Pace, train: Parallel, infer: Parallel, infer_first: int, fusion: FusionConfig) -> SwitchCost:
        # The run's buckets fit the run's model, not the modelled one.
        kept = FusionConfig(deployment=fusion.deployment, offload=fusion.offload, double_buffer=fusion.double_buffer)
        setup = Setup(pace.shape, pace.hardware, train, infer, infer_first, fusion=kept)
        here, there = setup.sides
        needs, topology = memory(setup), pace.hardware.topology
        away = to_infer(setup, traffic(pace.shape, here, there, topology), needs)
        back = to_train(setup, traffic(pace.shape, there, here, topology), needs)
        onload = next((s for part, s in back.parts.items() if part.startswith("onload")), 0.0)
        return cls(*(pace.seconds(s) for s in (away.seconds, back.seconds, onload, adopt_s(setup))))
