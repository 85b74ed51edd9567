"""Derive the workload of a step from a job's config: the one of plan, simulation and run.

    samples          data.prompts_per_step x algorithm.group_size
    prompt           data.max_prompt_length tokens
    responses        drawn by `prompts/lengths.py` around a median, at most rollout.max_response_length tokens
    their median     rollout.sampling.forced_median; null: MEDIAN_SHARE of rollout.max_response_length

Pure: the same config gives the same workload and the same text."""

from dataclasses import replace

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.setup import EngineLimits, Setup, SwitchLimits, TrainingLimits, Workload, limits_of
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
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
