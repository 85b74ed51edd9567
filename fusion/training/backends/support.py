"""Check whether Megatron-Core can train a model in a layout, before a worker starts. Needs neither torch nor Megatron.

What the backend refuses, the embedded one computes: every message names the key to change."""

import importlib.metadata

from fusion.model.config import ModelConfig
from fusion.model.formats.megatron import misfit
from fusion.model.parallel import Parallel

INSTALL = "pip install megatron-core==0.16.1"
OTHERWISE = "or training.backend=embedded"
RELEASES = "0.16."
"""Versions of Megatron-Core whose layers and router the backend is written for"""


def installed_version() -> str | None:
    """Return the version of megatron-core; None if it is not installed."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_megatron(config: ModelConfig, layout: Parallel) -> None:
    """Check that training.backend=megatron can train a model in the layout `parallel.train`.
    Raise ValueError: megatron-core is not installed, or another version; or the model, or a size of the layout, is not
    supported."""
    version = installed_version()
    if version is None or not version.startswith(RELEASES):
        state = "is not installed" if version is None else f"is {version}, expected {RELEASES}*"
        raise ValueError(f"training.backend=megatron: megatron-core {state}; {INSTALL}, {OTHERWISE}")
    if problem := misfit(config, layout):
        raise ValueError(f"parallel.train.{problem}; change it, {OTHERWISE}")
    if layout.tp > config.num_kv_heads:
        raise ValueError(
            f"parallel.train.tp={layout.tp} exceeds the model's num_key_value_heads={config.num_kv_heads}, which "
            f"Megatron-Core 0.16 does not compute; change it, {OTHERWISE}"
        )
