"""Predict the tokens a second of a die, in a decode step and in training, beside what other systems have published.

A published rate is predicted under its own conditions. Where these are not all published, `Published.conditions` says
what is assumed. Peers replay graphs and fuse more: the prediction is that of this project's operators."""

from dataclasses import dataclass, replace

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.roofline import Roofline, attention_pairs
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel

BATCH, CONTEXT = 64, 2048
"""Sequences of an attention rank and tokens of each that a plan's steps are predicted for"""
MICRO_BATCHES = 32
"""Micro-batches of a training step"""
LAUNCHES, CARD = "launches", "the card"
CANN_RECIPES = "https://gitcode.com/cann/cann-recipes-train/blob/master/"


@dataclass(frozen=True)
class Rate:
    """``tokens_per_s``: of a die. ``step_s``: seconds of a decode step, or of a micro-batch. ``limit``: `LAUNCHES` or
    `CARD`."""

    tokens_per_s: float
    step_s: float
    limit: str


@dataclass(frozen=True)
class Published:
    """A published rate of a die. ``sizes``: sequences of an attention rank, or of a micro-batch, and tokens of each."""

    shape: str
    hardware: str
    work: str
    system: str
    tokens_per_s: float
    parallel: Parallel
    sizes: tuple[int, int]
    conditions: str
    source: str

    def predicted(self, shape: Shape, hardware: Hardware) -> Rate:
        """Return the rate that the cost model predicts under the same conditions."""
        of = decode_rate if self.work == "decode" else train_rate
        return of(Roofline(shape, hardware, self.parallel), *self.sizes)


PUBLISHED = (
    Published(
        "qwen3_30b_a3b",
        "h100",
        "decode",
        "vLLM",
        10 / 13.18e-3,
        Parallel(1),
        sizes=(10, 2560),
        conditions="bf16, one GPU, 10 requests of 2,048 + 1,024 tokens: 13.18 ms a token, steps with prefill included",
        source="https://github.com/vllm-project/vllm/pull/23151",
    ),
    Published(
        "qwen3_30b_a3b",
        "h100",
        "train",
        "Megatron-Bridge 25.11",
        5275,
        Parallel(16, ep=8, pp=2),
        sizes=(2, 4096),
        conditions="FP8, 16 GPUs, PP2 EP8, micro-batches of 2 x 4,096 tokens, 32 a step; predicted in bf16",
        source="https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html",
    ),
    Published(
        "qwen3_30b_a3b",
        "h100",
        "train",
        "NeMo AutoModel",
        12040,
        Parallel(8, ep=8),
        sizes=(4, 4096),
        conditions="bf16, 8 GPUs, EP8, micro-batches of 4 x 4,096 tokens; balanced experts are assumed there",
        source="https://docs.nvidia.com/nemo/automodel/nightly/performance-summary.html",
    ),
    Published(
        "qwen3_30b_a3b",
        "ascend_910b",
        "decode",
        "vllm-ascend",
        3 / 23.89e-3 / 4,
        Parallel(4, tp=4),
        sizes=(3, 192),
        conditions="bf16, TP4, one request a second of 128 + 128 tokens: 23.89 ms a token, 3 at once on average",
        source="https://github.com/vllm-project/vllm-ascend/issues/1605",
    ),
    Published(
        "qwen3_30b_a3b",
        "ascend_910c",
        "decode",
        "vllm-ascend",
        32 * 3072 / 80.19,
        Parallel(16, ep=16),
        sizes=(32, 1536),
        conditions="bf16, 16 dies, EP16: 512 samples in 80.19 s; 3,072 steps are assumed, that of the longest response",
        source=CANN_RECIPES + "docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md",
    ),
    Published(
        "qwen3_30b_a3b",
        "ascend_910c",
        "train",
        "torchtitan-npu",
        1244,
        Parallel(16, tp=2, cp=2, ep=8),
        sizes=(1, 4096),
        conditions="bf16, 16 dies, TP2 CP2 EP8, 4 x 4,096 tokens a replica, recomputed in part; predicted without",
        source=CANN_RECIPES + "llm_sft/qwen3_30b_a3b/README_EN.md",
    ),
    Published(
        "qwen3_235b_a22b",
        "ascend_910c",
        "decode",
        "vllm-ascend",
        54 * 32 / 124.66e-3 / 128,
        Parallel(128, tp=4, ep=128),
        sizes=(54, 8192),
        conditions="bf16, 128 dies, TP4 EP128: 124.66 ms a step, 54 sequences a rank on average; 8,192 tokens assumed",
        source=CANN_RECIPES + "docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md",
    ),
    Published(
        "qwen3_235b_a22b",
        "ascend_910c",
        "decode",
        "vllm-ascend, few sequences",
        1024 * 6360 / 1369.4 / 128,
        Parallel(128, tp=4, ep=128),
        sizes=(6, 7000),
        conditions="bf16, 128 dies, TP4 EP128: 1,024 samples of 6,360 tokens in 1,369 s, 32,768 steps assumed",
        source=CANN_RECIPES + "docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md",
    ),
    Published(
        "deepseek_r1_671b",
        "ascend_910c",
        "decode",
        "vllm-ascend",
        8192 * 3039.8 / 318.27 / 256,
        Parallel(256, tp=2, ep=256),
        sizes=(64, 1600),
        conditions="bf16, 256 dies, TP2 EP256: 8,192 responses of 3,040 tokens in 318 s, prefill and hosts included",
        source=CANN_RECIPES + "docs/llm_rl/deepseek_rl_train_optimization.md",
    ),
    Published(
        "qwen3_235b_a22b",
        "ascend_910c",
        "train",
        "Megatron with MindSpeed",
        403.5 / 2,
        Parallel(128, tp=4, cp=4, pp=4, ep=32),
        sizes=(1, 7419),
        conditions="bf16, 128 dies, TP4 CP4 PP4 EP32, 8,192 samples of 7,419 tokens in 2,353 s, experts recomputed",
        source=CANN_RECIPES + "docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md",
    ),
)


def decode_rate(roofline: Roofline, sequences: int, context: int) -> Rate:
    """Predict a decode step of ``sequences`` on an attention rank with ``context`` tokens each."""
    seconds, parallel = roofline.engine_step_s(sequences, sequences * context), roofline.parallel
    limit = LAUNCHES if seconds == roofline.launch_floor_s else CARD
    return Rate(sequences * parallel.dp / seconds / parallel.world, seconds, limit)


def train_rate(roofline: Roofline, sequences: int, length: int, recompute: bool = False) -> Rate:
    """Predict the training of `MICRO_BATCHES` micro-batches of ``sequences`` of ``length`` tokens."""
    micro_batch, parallel = sequences * length, roofline.parallel
    tokens, pairs = MICRO_BATCHES * micro_batch, MICRO_BATCHES * sequences * attention_pairs(length)
    free = Roofline(roofline.shape, replace(roofline.hardware, operators="plain"), parallel)
    seconds, without_launches = (
        costs.train_step_s(tokens, pairs, micro_batch, recompute=recompute) for costs in (roofline, free)
    )
    limit = LAUNCHES if seconds > without_launches else CARD
    return Rate(tokens * parallel.replicas / seconds / parallel.world, seconds / MICRO_BATCHES, limit)


def plan_rates(setup: Setup) -> dict[str, Rate]:
    """Predict decoding and training of a plan in its layouts, both of sequences of `CONTEXT` tokens."""
    shape, hardware, training = setup.shape, setup.hardware, setup.training
    return {
        "decode": decode_rate(Roofline(shape, hardware, setup.infer), BATCH, CONTEXT),
        "train": train_rate(
            Roofline(shape, hardware, setup.train), training.token_budget // CONTEXT or 1, CONTEXT, training.recompute
        ),
    }


def published_rates(setup: Setup) -> list[tuple[Published, Rate]]:
    """Return what is published of the plan's model and card, each with the prediction under its conditions."""
    of_plan = (one for one in PUBLISHED if (one.shape, one.hardware) == (setup.shape.name, setup.hardware.name))
    return [(system, system.predicted(setup.shape, setup.hardware)) for system in of_plan]
