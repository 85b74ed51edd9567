"""Read the rollouts of `benchmarks/rollout_workloads.yaml`, and state every constant that is not a workload's own.

One constant is fitted (`STEP_S`), to `plain` on Moonlight and K2 only; Qwen2-VL-72B is held out of the fit, and nothing
is fitted to a ratio of two modes. Not blind: what the constant stands for (seconds of a step, rather than of a token or
a factor), `MAX_SEQS` and the placement of `plain` in an engine were chosen among alternatives whose seconds and some of
whose ratios on K2 and 72B had been seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import erf, exp, hypot, log, sqrt
from pathlib import Path

import yaml

from fusion.costmodel.hardware import Figure, Hardware, hardware_named
from fusion.costmodel.memory import largest_weight_bytes
from fusion.costmodel.presets import load_shape
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.resources import SHAPES

SPREAD = 0.89, 0.43
"""Standard deviations of the logarithm of lengths, between prompts and within a group: TailSieve's trace, whose median
and 90th percentile they give (`stalesync/prompts/lengths.py`)"""

PROMPT_TOKENS = 1024
"""Assumed: prompts' lengths are not published, and are short beside responses"""

CHUNK_TOKENS = 2048
"""Tokens of a chunk; of Seer's about 8K (not published)"""

MAX_SEQS = 256
"""Sequences that an engine decodes at most: vLLM's default, `max_num_seqs`"""

MAX_BATCH_TOKENS = 8192
"""Tokens of a step at most: veRL's default"""

KV_FRACTION = 0.9
"""vLLM's default, `gpu_memory_utilization`"""

STEP_S = 15e-3
"""Seconds of a step beside those of the cost model: the host's scheduling, sampling and detokenizing, during which the
card waits. Fitted to plain on Moonlight / K2: there the products of simulated seconds and published ones are equal"""

HARDWARE = replace(hardware_named("h800"), launch_s=Figure(0.0, "the published engines replay graphs"))
STEPS_OF_EPOCH = 3
"""Of RhymeRL's ablation: assumed"""


@dataclass(frozen=True)
class Workload:
    """One iteration's rollout.

    Attributes:
        infer: layout of an engine.
        mean_tokens: of responses; None: their 99th percentile is the maximum, about 10 times the median (TailSieve).
        weight_bytes: of a parameter in HBM.
        max_seqs: sequences that an engine decodes at most.
        spread: standard deviations of the logarithm of lengths, between prompts and within a group.
        published: seconds of the rollout and of its tail; ratio: published speeds relative to `plain`, by mode.
    """

    model: str
    gpus: int
    infer: Parallel
    requests: int
    group_size: int
    max_tokens: int
    mean_tokens: int | None = None
    weight_bytes: float = 2.0
    max_seqs: int = MAX_SEQS
    spread: tuple[float, float] = SPREAD
    published: dict[str, float] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)

    @property
    def prompts(self) -> int:
        return self.requests // self.group_size

    @property
    def engines(self) -> int:
        return self.gpus // self.infer.world

    @property
    def shape(self) -> Shape:
        return load_shape(self.model, SHAPES).shape

    @property
    def kv_tokens(self) -> int:
        """Capacity of an attention rank's KV cache: `KV_FRACTION` of what weights and runtime leave."""
        free = HARDWARE.usable_bytes - largest_weight_bytes(self.shape, self.infer) * self.weight_bytes / 2
        return int(KV_FRACTION * free / self.shape.kv_bytes(self.infer.tp))

    @property
    def median_tokens(self) -> float:
        """The median of lengths at which their mean is the given one."""
        low, high = 1.0, float(self.max_tokens)
        if self.mean_tokens is None:
            return self.max_tokens / 10
        for _ in range(60):
            middle = (low + high) / 2
            below = capped_mean(middle, self.max_tokens, self.spread) < self.mean_tokens
            low, high = (middle, high) if below else (low, middle)
        return low

    def fewer(self, part: int) -> Workload:
        """Return the workload with one ``part``-th of its requests, in whole groups."""
        return replace(self, requests=self.requests // part // self.group_size * self.group_size)


def hardware(workload: Workload) -> Hardware:
    """Return the H800. Weights in FP8 are read and multiplied in half of the time; so
    is the KV cache here, which is in bf16, but small for K2's latent attention."""
    times = 2 / workload.weight_bytes
    return replace(
        HARDWARE,
        flops=replace(HARDWARE.flops, value=HARDWARE.flops.value * times),
        hbm_bytes_per_s=replace(HARDWARE.hbm_bytes_per_s, value=HARDWARE.hbm_bytes_per_s.value * times),
    )


def capped_mean(median: float, cap: float, spread: tuple[float, float]) -> float:
    """Return the mean of lognormal lengths, of which longer ones have the length ``cap``."""

    def normal(x: float) -> float:
        return (1 + erf(x / sqrt(2))) / 2

    sigma = hypot(*spread)
    bound = log(cap / median) / sigma
    return median * exp(sigma**2 / 2) * normal(bound - sigma) + cap * (1 - normal(bound))


def _read() -> dict[str, Workload]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    spreads = {name: {"spread": tuple(row["spread"])} if "spread" in row else {} for name, row in rows.items()}
    return {name: Workload(**row | spreads[name] | {"infer": Parallel(**row["infer"])}) for name, row in rows.items()}


WORKLOADS = _read()
