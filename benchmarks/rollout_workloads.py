"""State the published rollouts that `benchmarks/rollout_replay.py` replays, and every constant, with its source.

Source of what is published: Seer, arXiv 2511.14617 (OSDI'26), tables of workloads and of results: 32 nodes of 8 H800,
means of 5 iterations; the baseline is veRL. One constant is fitted (`STEP_S`), to `plain` on Moonlight and K2 only;
Qwen2-VL-72B is held out of the fit, and nothing is fitted to a ratio of two modes. Not blind: what the constant stands
for (seconds of a step, rather than of a token or a factor), `MAX_SEQS` and the placement of `plain` in an engine were
chosen among alternatives whose seconds and some of whose ratios on K2 and 72B had been seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import erf, exp, hypot, log, sqrt

from fusion.costmodel.hardware import Hardware, hardware_named
from fusion.costmodel.memory import largest_weight_bytes
from fusion.costmodel.presets import load_shape
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.resources import SHAPES


@dataclass(frozen=True)
class Published:
    """Seconds of an iteration's rollout and of its tail, and speed relative to veRL (cumulative). Tail: the time spent
    solely on the last 10 % of requests."""

    plain_s: float
    plain_tail_s: float
    seer_s: float
    seer_tail_s: float
    ratio: dict[str, float]


@dataclass(frozen=True)
class Workload:
    """One iteration's rollout. ``infer``: layout of an engine; ``weight_bytes``: of a parameter in HBM; ``max_seqs``:
    sequences that an engine decodes at most; ``spread``: standard deviations of the logarithm of lengths, between
    prompts and within a group."""

    model: str
    gpus: int
    infer: Parallel
    requests: int
    group_size: int
    max_tokens: int
    mean_tokens: int
    weight_bytes: float = 2.0
    max_seqs: int = field(default_factory=lambda: MAX_SEQS)
    spread: tuple[float, float] = field(default_factory=lambda: SPREAD)

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
        """The median of lengths at which their mean is the published one."""
        low, high = 1.0, float(self.max_tokens)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if capped_mean(middle, self.max_tokens, self.spread) < self.mean_tokens
                else (low, middle)
            )
        return low


@dataclass(frozen=True, kw_only=True)
class Replayed(Workload):
    """A published rollout."""

    published: Published


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

HARDWARE = hardware_named("h800")


def hardware(workload: Workload) -> Hardware:
    """Returns the H800. Weights in FP8 are read and multiplied in half of the time; so
    is the KV cache here, which is in bf16, but small for K2's latent attention."""
    times = 2 / workload.weight_bytes
    return replace(
        HARDWARE,
        flops=replace(HARDWARE.flops, value=HARDWARE.flops.value * times),
        hbm_bytes_per_s=replace(HARDWARE.hbm_bytes_per_s, value=HARDWARE.hbm_bytes_per_s.value * times),
    )


def capped_mean(median: float, cap: float, spread: tuple[float, float]) -> float:
    """Returns the mean of lognormal lengths, of which longer ones have the length ``cap``."""
    sigma = hypot(*spread)
    bound = log(cap / median) / sigma
    return median * exp(sigma**2 / 2) * _normal(bound - sigma) + cap * (1 - _normal(bound))


def _normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


WORKLOADS = {
    "moonlight": Replayed(
        model="moonlight_16b_a3b",
        gpus=32,
        infer=Parallel(),
        requests=3200,
        group_size=8,
        max_tokens=65536,
        mean_tokens=22386,
        published=Published(3910, 1817, 2181, 278, {"divided": 1.41, "context": 1.47, "seer": 1.90}),
    ),
    "qwen2_vl_72b": Replayed(
        model="qwen2_vl_72b",
        gpus=128,
        infer=Parallel(8, tp=8),
        requests=9600,
        group_size=16,
        max_tokens=40960,
        mean_tokens=7615,
        published=Published(3957, 2301, 1922, 123, {"divided": 1.42, "context": 1.56, "seer": 2.04, "oracle": 1.63}),
    ),
    "kimi_k2": Replayed(
        model="kimi_k2",
        gpus=256,
        infer=Parallel(32, ep=32),
        requests=6400,
        group_size=8,
        max_tokens=98304,
        mean_tokens=38959,
        published=Published(12202, 3144, 8267, 850, {"divided": 1.16, "context": 1.27, "seer": 1.53}),
        weight_bytes=1.0,
    ),
}
"""GPUs, GPUs of an engine, requests of an iteration, G, maximum and mean length: published. Layouts within an engine:
assumed (one die; tensor parallel; attention data parallel, experts over all dies). K2's weights are in FP8, as it is
released."""


@dataclass(frozen=True)
class RhymeWorkload:
    """The steps of RhymeRL's ablation. ``tp``: of engines and trainer; ``published``: speed relative to veRL
    (cumulative)."""

    model: str
    gpus: int
    tp: int
    prompts: int
    group_size: int
    steps_of_epoch: int
    max_tokens: int
    published: dict[str, float]

    @property
    def median_tokens(self) -> float:
        """The median of lengths whose 99th percentile is the maximum: it is about 10 times the median (TailSieve's
        trace)."""
        return self.max_tokens / 10

    @property
    def kv_tokens(self) -> int:
        """Capacity of an engine's KV cache: `KV_FRACTION` of what weights and runtime leave."""
        shape = load_shape(self.model, SHAPES).shape
        free = HARDWARE.usable_bytes - largest_weight_bytes(shape, Parallel(self.tp, tp=self.tp))
        return int(KV_FRACTION * free / shape.kv_bytes(self.tp))


RHYME = RhymeWorkload(
    model="qwen3_14b",
    gpus=128,
    tp=2,
    prompts=512,
    group_size=8,
    steps_of_epoch=3,
    max_tokens=16384,
    published={"histopipe": 1.43, "two_tier": 1.56, "histospec": 2.34},
)
"""RhymeRL, arXiv 2508.18588. 128 GPUs, 14B parameters, at most 16K tokens, ratios of Math-14B: published. Assumed: that
the model is Qwen3-14B and the GPUs H800s, layouts, prompts, G, steps of an epoch, and that all cards train and generate
in turn. The best published ratio, of any of its workloads, is 2.61."""
