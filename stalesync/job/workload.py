"""Derive what the cost model needs of a job's config: the workload of a step, the one of plan, simulation and run; and
estimate the memory that the job takes of a card in each phase, to refuse one that does not fit.

    samples          data.prompts_per_step x algorithm.group_size
    prompt           data.max_prompt_length tokens
    responses        drawn by `prompts/lengths.py` around a median, at most rollout.max_response_length tokens
    their median     rollout.sampling.forced_median; null: MEDIAN_SHARE of rollout.max_response_length

The same config gives the same workload and the same text. Refused is what the estimate of memory is sure of: a phase
that does not fit cards whose memory is known, with bfloat16 weights, for which the estimate is. Anything else that may
not fit is a warning."""

import logging
from dataclasses import replace

from fusion.costmodel.fitting import advice
from fusion.costmodel.hardware import Hardware, hardware_named
from fusion.costmodel.memory import MemoryEstimate, estimate_memory
from fusion.costmodel.search import phase_problems, problems
from fusion.costmodel.setup import EngineLimits, Setup, SwitchLimits, TrainingLimits, Workload, limits_of
from fusion.costmodel.shape import Shape
from fusion.model import ModelConfig, Parallel
from fusion.npu.config import DEFAULT_CAPACITY_BYTES, table_of
from stalesync.job.config import Config
from stalesync.prompts.lengths import ForcedLengths

MEDIAN_SHARE = 1 / 8
"""Median over maximum of the lengths of responses where the config states no median"""


def lengths_of(config: Config) -> ForcedLengths:
    """Return the lengths of responses that are assumed of a job."""
    rollout = config.rollout
    median = rollout.sampling.forced_median or max(1.0, MEDIAN_SHARE * rollout.max_response_length)
    sampling = replace(rollout.sampling, forced_median=median)
    lengths = ForcedLengths.of(replace(rollout, sampling=sampling), config.run.seed)
    assert lengths is not None
    return lengths


def workload_of(config: Config) -> Workload:
    return Workload(
        samples=config.data.prompts_per_step * config.algorithm.group_size,
        prompt=float(config.data.max_prompt_length),
        response=lengths_of(config).mean,
        longest=config.rollout.max_response_length,
        group=config.algorithm.group_size,
    )


def setup_of(config: Config, shape: Shape, *, hardware: Hardware, dies: int) -> Setup:
    """Return the setup of a job on ``dies``, without layouts."""
    return Setup(
        replace(shape, adapters=config.training.lora.adapters),
        hardware,
        train=Parallel(dies),
        infer=Parallel(dies),
        training=replace(limits_of(TrainingLimits, config.training), share_prefixes=config.training.shares_prefixes),
        fusion=limits_of(SwitchLimits, config.fusion),
        rollout=limits_of(EngineLimits, config.rollout.engine),
        workload=workload_of(config),
        copies_latents=config.rollout.backend == "vllm" and hardware.operators == "ascend",
        shares_kv=config.rollout.backend == "embedded" and not config.rollout.engine.batch_invariant,
    )


def describe_sharing(setup: Setup) -> str:
    """Describe which rows training computes once for several samples, on which its seconds and activations rest."""
    work, setting = setup.workload, f"training.share_prefixes={setup.training.share_prefixes}"
    saved = 1 - setup.trained_rows / work.tokens
    if not saved:
        return f"{setting}: training computes every row: sharing prompts of {work.prompt:,.0f} tokens saves nothing"
    return (
        f"{setting}: the {work.group} samples of a prompt share its {work.prompt:,.0f} rows within a micro-batch of "
        f"training.token_budget={setup.training.token_budget}: training computes {saved:.0%} fewer rows"
    )


def describe(config: Config) -> str:
    """Describe the workload with the keys it comes from."""
    work, lengths = workload_of(config), lengths_of(config)
    stated = config.rollout.sampling.forced_median is not None
    origin = (
        "rollout.sampling.forced_median"
        if stated
        else f"{MEDIAN_SHARE:g} of it, as rollout.sampling.forced_median=null"
    )
    return (
        f"workload of a step: {work.samples:,} samples (data.prompts_per_step={config.data.prompts_per_step} x "
        f"algorithm.group_size={config.algorithm.group_size}); prompts of {work.prompt:,.0f} tokens "
        f"(data.max_prompt_length); responses of at most {work.longest:,} (rollout.max_response_length), "
        f"{work.response:,.0f} on average, with a median of {lengths.median:,g} ({origin})"
    )


log = logging.getLogger(__name__)
SOME_CARD = "ascend_910b"
"""Card whose memory is assumed where none is named"""


def knows_cards(config: Config) -> bool:
    """Return whether the memory of the cards is known before they start."""
    named = config.cluster.hardware or config.device.capacity_bytes
    return bool(named) or config.device.kind == "emulated"


def estimate(config: Config, model: ModelConfig) -> tuple[Setup, MemoryEstimate]:
    """Return the plan of a job and its memory; log a warning for what does not fit. Raise ValueError, with settings
    that would do, for a phase that is sure not to."""
    setup = plan_of(config, model)
    sizes = estimate_memory(setup)
    too_large = phase_problems(setup, sizes)
    if too_large and knows_cards(config) and config.model.dtype == "bfloat16":
        raise ValueError(
            f"fusion.offload={config.fusion.offload} training.token_budget={config.training.token_budget}: "
            f"{'; '.join(too_large)}; {advice(setup)}"
        )
    for problem in problems(setup, sizes):
        log.warning("memory: %s", problem)
    return setup, sizes


def plan_of(config: Config, model: ModelConfig) -> Setup:
    """Return the plan of a job for cards with the memory of its own."""
    hardware = hardware_named(config.cluster.hardware or SOME_CARD)
    emulated = DEFAULT_CAPACITY_BYTES if config.device.kind == "emulated" else None
    if capacity := config.device.capacity_bytes or emulated:
        hbm, reserved = (
            replace(figure, value=float(value))
            for figure, value in ((hardware.hbm_bytes, capacity), (hardware.reserved_bytes, 0))
        )
        kind = "the emulated card" if emulated else hardware.name
        hardware = replace(hardware, name=kind, hbm_bytes=hbm, reserved_bytes=reserved)
    if (stated := config.device.operators) != "auto" or emulated:
        hardware = replace(hardware, operators=table_of(config.device.kind, stated))
    deployment, shape = config.deployment, Shape(config.model.path, model.without_predictors)
    setup = setup_of(config, shape, hardware=hardware, dies=config.cluster.npus)
    infer_first = 0 if deployment.shared else len(deployment.train)
    return setup.with_layouts(config.train_layout, config.infer_layout, infer_first)
