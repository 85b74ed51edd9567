"""Read the rollouts of `benchmarks/rollout_workloads.yaml`, and state every constant that is not a workload's own.

One constant is fitted (`STEP_S`), to `plain` on Moonlight and K2 only; Qwen2-VL-72B is held out of the fit, and nothing
is fitted to a ratio of two modes. Not blind: what the constant stands for (seconds of a step, rather than of a token or
a factor), `MAX_SEQS` and the placement of `plain` in an engine were chosen among alternatives whose seconds and some of
whose ratios on K2 and 72B had been seen.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from fusion.costmodel.hardware import Figure, Hardware, hardware_named
from fusion.costmodel.memory import largest_weight_bytes
from fusion.costmodel.presets import load_shape
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.resources import SHAPES
from stalesync.prompts.lengths import ForcedLengths

SPREAD = 0.89, 0.43
"""Standard deviations of the logarithm of lengths, between prompts and within a group: TailSieve's trace, whose median
and 90th percentile they give (`stalesync/prompts/lengths.py`)"""
PROMPT_TOKENS = 1024
"""Assumed: prompts' lengths are not published, and are short beside responses"""
CHUNK_TOKENS = 2048
"""Tokens of a chunk; of Seer's about 8K (not published)"""
MAX_SEQS, MAX_BATCH_TOKENS, KV_FRACTION = 256, 8192, 0.9
"""Sequences that an engine decodes and tokens of a step, at most, and share of the memory: defaults of vLLM
(`max_num_seqs`), veRL, and vLLM (`gpu_memory_utilization`)"""
STEP_S = 15e-3
"""Seconds of a step beside those of the cost model: the host's scheduling, sampling and detokenizing, during which the
card waits. Fitted to plain on Moonlight / K2: there the products of simulated seconds and published ones are equal"""

HARDWARE = replace(hardware_named("h800"), launch_s=Figure(0.0, "the published engines replay graphs"))
STEPS_OF_EPOCH = 3
"""Of RhymeRL's ablation: assumed"""


@dataclass(frozen=True)
class Workload:
    """One iteration's rollout. ``infer``: layout of an engine; ``mean_tokens``: of responses, None: their 99th
    percentile is the maximum, about 10 times the median (TailSieve); ``weight_bytes``: of a parameter in HBM;
    ``published``: seconds of the rollout and of its tail; ``ratio``: published speeds relative to `plain`, by mode."""

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
            below = ForcedLengths(0, middle, self.max_tokens, (*self.spread, 0.0)).mean < self.mean_tokens
            low, high = (middle, high) if below else (low, middle)
        return low

    def fewer(self, part: int) -> "Workload":
        """Return the workload with one ``part``-th of its requests, in whole groups."""
        return replace(self, requests=self.requests // part // self.group_size * self.group_size)


def hardware(workload: Workload) -> Hardware:
    """Return the H800. Weights in FP8 are read and multiplied in half of the time; so is the KV cache here, which is in
    bf16, but small for K2's latent attention."""
    rates = {name: getattr(HARDWARE, name) for name in ("flops", "hbm_bytes_per_s")}
    faster = {name: replace(one, value=one.value * 2 / workload.weight_bytes) for name, one in rates.items()}
    return replace(HARDWARE, **faster)


WORKLOADS = {
    name: Workload(**row | {"infer": Parallel(**row["infer"]), "spread": tuple(row.get("spread", SPREAD))})
    for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
