"""The parameter tables of the programs that hold the model's weights, each by the name of its format. Pure.

    embedded    `Transformer` (fusion.model.table): matrices are cut along their rows to fit units of storage
    stacked     the same local tensors, but the equal matrices of a layer's experts lie in one unit each, not cut: where
                a card multiplies a stack (`Plain.stacks_experts`)
    megatron    Megatron-Core's GPTModel: a tensor is one parameter and so one unit, however large
    vllm        vLLM's models: as Megatron's; the experts of a layer are two tensors, the vocabulary is padded.
                vllm_cpu and vllm_ascend: as on other devices than CUDA

A format is all that a switch, a checkpoint or an export needs to know of a model beside its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.parallel import Parallel
from fusion.model.table import local_params

if TYPE_CHECKING:  # a command that only checks a config does not load torch
    from fusion.npu.operators import Plain

Format = Literal["embedded", "stacked", "megatron", "vllm", "vllm_cpu", "vllm_ascend"]

EMBEDDED: Format = "embedded"
STACKED: Format = "stacked"
MEGATRON: Format = "megatron"
VLLM: Format = "vllm"
VLLM_CPU: Format = "vllm_cpu"
VLLM_ASCEND: Format = "vllm_ascend"


def embedded_format(operators: Plain) -> Format:
    """Return the format of `Transformer` on a card with these operators."""
    return STACKED if operators.stacks_experts else EMBEDDED


def train_format(backend: str, operators: Plain) -> Format:
    """Return the format of the trainer's weights. ``backend``: `training.backend`."""
    return embedded_format(operators) if backend == EMBEDDED else MEGATRON


def engine_format(backend: str, device_kind: str, operators: Plain) -> Format:
    """Return the format of the engine's weights. ``backend``: `rollout.backend`. ``device_kind``: the kind of card,
    resolved (`fusion.npu.config.claim`); emulated ones compute on the CPU."""
    if backend == EMBEDDED:
        return embedded_format(operators)
    formats: dict[str, Format] = {"cuda": VLLM, "emulated": VLLM_CPU, "ledger": VLLM_CPU, "npu": VLLM_ASCEND}
    return formats[device_kind]


def local_table(
    format: Format, config: ModelConfig, parallel: Parallel, rank: int, *, max_bytes: int, itemsize: int
) -> tuple[LocalParam, ...]:
    """Return the local tensors of ``rank`` in a format, in the order of the forward pass. ``max_bytes``: of a unit of
    storage; formats whose tensors can be cut cut them to fit. ``itemsize``: bytes of an element.
    Raise ValueError: the format does not describe this model or layout."""
    if format in (EMBEDDED, STACKED):
        return local_params(config, parallel, rank, max_numel=max_bytes // itemsize, stacks=format == STACKED)
    if format == MEGATRON:
        from fusion.model.formats import megatron

        return megatron.local_params(config, parallel, rank)
    from fusion.model.formats import vllm

    variants = {VLLM: vllm.CUDA, VLLM_CPU: vllm.CPU, VLLM_ASCEND: vllm.ASCEND}
    return vllm.local_params(config, parallel, rank, variants[format])
