"""Define what an emulated card models: a card, a model, and the scales of tokens and seconds.

    device.pace           shape of the modelled model       ┐
    device.pace_tokens    modelled tokens per token          ├─► Pace ─► EngineCost, TrainerCost, SwitchCost:
    device.pace_speed     modelled seconds per second        │           plain observations in, seconds of the run out,
    device.pace_training  factor on the cost of an update    │           by kind of work
    cluster.hardware      the modelled card                 ┘

A token of the run represents `token_scale` modelled tokens, in prompts, responses and contexts: a decode step of the
run is that many decode steps of the modelled engine, with contexts that many times as long. A second of the run
represents `time_scale` modelled seconds, so modelled tokens per modelled second are the run's rate x token_scale /
time_scale. With equal scales a decode step of the run takes exactly as long as one of the modelled engine, and the
run's rates are the modelled ones.

Not modelled: how much fits into HBM (`scripts/plan.py` computes that), rewards by rules (`reward.latency_s`), the
queue, copies of frozen models to and from the host, and copies of the KV of a chunk, which overlap with the next steps.
That a switch hides the offload, and training the loading, is measured by `benchmarks/overlap.py`.

Pure: no clock and no device. `fusion.colocate.paced` observes a card and sleeps for the seconds computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from fusion.costmodel.hardware import Figure, Hardware, hardware_named
from fusion.costmodel.presets import load_shape
from fusion.costmodel.roofline import Roofline, attention_pairs
from fusion.costmodel.search import estimate
from fusion.costmodel.setup import Setup, SwitchLimits, TrainingLimits
from fusion.costmodel.shape import Shape
from fusion.costmodel.switch_time import adopt_s
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel
from fusion.model.prefixes import links_within, rows_saved
from fusion.npu import DeviceConfig

SecondsByKind = dict[str, float]
"""Kind of work → seconds of the run."""


@dataclass(frozen=True)
class Pace:
    """The modelled model and card, and the scales between them and the run."""

    shape: Shape
    hardware: Hardware
    token_scale: int
    """Modelled tokens per token of the run."""
    time_scale: float
    """Modelled seconds per second of the run."""
    training_scale: float = 1.0
    """Factor on the cost of an update, its forward and backward passes included."""

    @classmethod
    def load(cls, device: DeviceConfig, hardware: str | None, shapes: Path) -> Pace:
        """Resolve the config of a device that has a pace; ``shapes``: the folder of the models' shapes.
        Raise ValueError: no such model or hardware, by key."""
        assert device.pace is not None, "the device has no pace"
        if hardware is None:
            raise ValueError(f"device.pace={device.pace}: expected cluster.hardware to name the modelled cards")
        shape = load_shape(device.pace, shapes, key="device.pace").shape
        return cls(
            shape=shape,
            hardware=hardware_named(hardware),
            token_scale=device.pace_tokens,
            time_scale=device.pace_speed,
            training_scale=device.pace_training,
        )

    def __str__(self) -> str:
        scales = f"a token represents {self.token_scale} modelled tokens, a second {self.time_scale:g} modelled seconds"
        scales += f", training counts {self.training_scale:g} times" if self.training_scale != 1 else ""
        return f"{self.shape.name} on {self.hardware.name}, {scales}"

    def check(self, parallel: Parallel, key: str) -> None:
        """Check that the modelled model can be cut by a layout of the run; ``key`` names the layout.
        Raise ValueError: it cannot, with both numbers."""
        if wrong := parallel.misfit(self.shape.config):
            raise ValueError(f"device.pace={self.shape.name} does not fit {key}: {wrong}")

    def run_seconds(self, modelled_s: float) -> float:
        return modelled_s / self.time_scale


class StepSums(NamedTuple):
    """What an engine's step computes: the sums on which its seconds depend, in tokens of the run.

    ``decodes``, ``contexts``: sequences that decode, and the sum of the tokens their new ones attend to, themselves
    included; ``first_tokens``, ``first_contexts``: the same of those whose prefill ends, so that their first tokens are
    sampled; ``prefill_tokens``, ``attended``: tokens of the pieces of prompts, and their `attention_pairs`;
    ``drafted``, ``drafted_pairs``: the same of drafts that are verified, each behind a token that decodes."""

    decodes: int
    contexts: float
    first_tokens: int = 0
    first_contexts: int = 0
    prefill_tokens: int = 0
    attended: float = 0.0
    drafted: int = 0
    drafted_pairs: float = 0.0


@dataclass(frozen=True)
class EngineCost:
    """Cost of an engine's steps in a layout. ``full_batch``: sequences at which an attention rank decodes best."""

    pace: Pace
    layout: Parallel
    full_batch: int

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.pace.shape, self.pace.hardware, self.layout)

    def __call__(self, sums: StepSums) -> tuple[SecondsByKind, SecondsByKind]:
        """Cost an attention rank's step: its seconds, and those of a card that never lacks requests."""
        scale, roofline, drafted = self.pace.token_scale, self.roofline, sums.drafted
        # Of the modelled tokens of a sequence's first token, the prefill samples one, decode steps the others.
        batch = sums.decodes + sums.first_tokens * (scale - 1) / scale
        kv = (sums.contexts + sums.first_contexts * (scale - 1) / scale) * scale
        attended, pairs = sums.attended * scale, sums.drafted_pairs * scale
        decode = ideal = 0.0
        if batch:
            decode = roofline.engine_step_s(batch, kv, prefill_tokens=drafted, drafted_pairs=pairs) * scale
            ideal = roofline.ideal_decode_s(batch, kv, self.full_batch) * scale
            tokens = drafted + sums.prefill_tokens
            both = roofline.engine_step_s(batch, kv, tokens, attended=attended, drafted_pairs=pairs) * scale
            prefill = both - decode
        else:
            prefill = roofline.prefill_s(sums.prefill_tokens * scale, attended * scale)
        return self._by_kind(decode, prefill) or {"decode": 0.0}, self._by_kind(ideal, prefill)

    def step_s(self, sums: StepSums) -> float:
        """Cost an attention rank's step in total, from sums in which drafts count as pieces of prompts."""
        scale = self.pace.token_scale
        first = (scale - 1) / scale
        batch = sums.decodes + sums.first_tokens * first
        attended = sums.attended * scale
        if not batch:
            modelled_s = self.roofline.prefill_s(sums.prefill_tokens * scale, attended * scale)
            return self.pace.run_seconds(modelled_s)
        kv_tokens = (sums.contexts + sums.first_contexts * first) * scale
        lines = self.roofline.step_lines(batch + sums.prefill_tokens)
        return self.pace.run_seconds(max(line(kv_tokens, attended) for line in lines) * scale)

    def decode_lines(self, batch: int, drafted: int = 0) -> list[tuple[float, float]]:
        """Return (seconds, seconds for each token of context) of lines whose maximum is the cost of a step that
        decodes ``batch`` sequences, and verifies ``drafted`` tokens behind each."""
        scale = self.pace.token_scale
        pairs = batch * attention_pairs(drafted) * scale
        return [
            (
                self.pace.run_seconds((line.fixed + line.per_decoded * pairs) * scale),
                self.pace.run_seconds((line.per_decoded * (1 + drafted) + line.per_kv) * scale * scale),
            )
            for line in self.roofline.step_lines(batch * (1 + drafted))
        ]

    def out_s(self, kv_tokens: int) -> float:
        """Estimate the seconds in which a die copies the KV of this many tokens of the run to the host."""
        return self._copy_s(kv_tokens, self.pace.hardware.out_bytes_per_s)

    def back_s(self, kv_tokens: int) -> float:
        """Estimate the seconds in which a die copies it back."""
        return self._copy_s(kv_tokens, self.pace.hardware.back_bytes_per_s)

    def _copy_s(self, kv_tokens: int, bytes_per_s: Figure) -> float:
        layout = self.layout
        of_token = self.pace.shape.kv_bytes(layout.tp, layout.pp, dcp=layout.dcp)
        nbytes = kv_tokens * self.pace.token_scale * of_token
        return self.pace.run_seconds(nbytes / bytes_per_s.value)

    def _by_kind(self, decode_s: float, prefill_s: float) -> SecondsByKind:
        modelled = {"decode": decode_s, "prefill": prefill_s}
        return {kind: self.pace.run_seconds(seconds) for kind, seconds in modelled.items() if seconds}


@dataclass(frozen=True)
class TrainerCost:
    """Cost of passes over samples of a data-parallel rank, and of updates. Micro-batches have the default token budget:
    the run's own is in tokens of the run. ``share_prefixes``: as of the config group `training`; ``common``: tokens
    that each sample has in common with the one before it, (): none has any."""

    pace: Pace
    layout: Parallel
    recompute: bool = True
    share_prefixes: str = "off"

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.pace.shape, self.pace.hardware, self.layout)

    def train(self, lengths: Sequence[int], common: Sequence[int] = ()) -> SecondsByKind:
        """Cost forward and backward passes over samples of these lengths."""
        tokens, attended = self.sizes(lengths, common)
        seconds = self.roofline.train_step_s(
            tokens, attended, token_budget=TrainingLimits().token_budget, recompute=self.recompute
        )
        return {"train": self.pace.run_seconds(seconds * self.pace.training_scale)}

    def forward(self, lengths: Sequence[int], kind: str, common: Sequence[int] = ()) -> SecondsByKind:
        """Cost a forward pass over samples of these lengths, under the name ``kind``."""
        tokens, attended = self.sizes(lengths, common)
        seconds = self.roofline.forward_s(tokens, attended, TrainingLimits().token_budget)
        return {kind: self.pace.run_seconds(seconds)}

    def update(self) -> SecondsByKind:
        seconds = self.roofline.optimizer_step_s()
        return {"optimizer": self.pace.run_seconds(seconds * self.pace.training_scale)}

    def sizes(
        self, lengths: Sequence[int], common: Sequence[int] = (), token_budget: int = TrainingLimits.token_budget
    ) -> tuple[float, float]:
        """Return the modelled rows that are computed, and the modelled pairs of attention."""
        modelled = [length * self.pace.token_scale for length in lengths]
        rows, pairs = sum(modelled), sum(map(attention_pairs, modelled))
        if any(common):
            same = [tokens * self.pace.token_scale for tokens in common]
            shared = links_within(modelled, same, self.share_prefixes, token_budget)
            rows -= sum(map(rows_saved, modelled, shared))
            pairs -= sum(map(attention_pairs, shared))
        return rows, pairs


@dataclass(frozen=True)
class SwitchCost:
    """Seconds of a switch, as `scripts/plan.py` estimates them."""

    infer_s: float
    """Seconds of a switch to generation."""
    train_s: float
    """Seconds of a switch to training."""
    onload_s: float
    """Seconds of loading the optimizer, which overlaps with training."""
    adopt_s: float
    """Seconds of an engine's pause to adopt weights that were received while it generated."""
    network_bytes: float = 0.0
    """Bytes that all dies receive from other supernodes (or nodes, where there are none) in a switch to generation."""

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, pace: Pace, *, train: Parallel, infer: Parallel, infer_first: int, fusion: SwitchLimits) -> SwitchCost:
        """Cost the switch between two layouts, once for all runs with them: of 12,288 dies it takes some seconds.

        ``infer_first`` is the first rank that generates."""
        # The run's buckets fit the run's model, not the modelled one.
        modelled = replace(fusion, bucket_bytes=SwitchLimits.bucket_bytes)
        setup = Setup(pace.shape, pace.hardware, train=train, infer=infer, infer_first=infer_first, fusion=modelled)
        estimated = estimate(setup)
        away, back = estimated.switches
        return cls(
            infer_s=pace.run_seconds(away.seconds),
            train_s=pace.run_seconds(back.seconds),
            onload_s=pace.run_seconds(back.onload_s),
            adopt_s=pace.run_seconds(adopt_s(setup)),
            network_bytes=float(estimated.moved[0].received[LEVELS.index("network")].sum()),
        )
