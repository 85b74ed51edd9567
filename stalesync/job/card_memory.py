"""Estimate the memory that a job takes of a card in each phase, and refuse a job that does not fit.

Refused is what the estimate is sure of: a phase that does not fit cards whose memory is known, with bfloat16 weights,
for which the estimate is. Anything else that may not fit is a warning."""

import logging
from dataclasses import replace

from fusion.costmodel.fitting import advice
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import MemoryEstimate, estimate_memory
from fusion.costmodel.search import phase_problems, problems
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import ModelConfig
from fusion.npu.config import DEFAULT_CAPACITY_BYTES, table_of
from stalesync.job.config import Config
from stalesync.job.workload import setup_of

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
