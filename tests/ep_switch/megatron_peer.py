"""Megatron-Core's model with its own storage and process groups, and its refit, as peers to compare with.

The refit is `megatron.core.resharding` on the same tensors, layouts, cards and wire: two GPTModels with torch's own
storage, both resident, as it requires. Its transport is the one for cards (`NCCLCopyService`: batched p2p on the card's
tensors, here over hccl). The first call caches its plan.

Version 0.16.1 recognises experts by names that only Transformer Engine's grouped layer has, and by an attribute that a
model without expert parallelism does not set; for its own SequentialMLP it silently copies wrong experts when EP
changes. `_experts` supplies both, so that the timed refit copies the right weights.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fusion.model import ModelConfig, Parallel
from fusion.model.formats.megatron import local_params
from fusion.npu import Device
from fusion.training.backends.megatron_device import redirect_to
from tests.ep_switch.pair import check, fill, wall, worst


@contextmanager
def megatron_layout(parallel: Parallel) -> Iterator[None]:
    """Create Megatron's global process groups for a layout. Collective over all processes, the layout's ranks."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build_peer(config: ModelConfig, parallel: Parallel, rank: int, device: Device) -> Any:
    """Return a float32 `GPTModel` with zero weights on ``device``. Call it inside the `megatron_layout` of the layout.

    The model keeps the process groups it was built with (`pg_collection`), so that models in several layouts can exist
    at once; only the sharded state dict of tied embeddings still needs Megatron's global state and so the block.

    Args:
        rank: rank of the calling process.
    """
    redirect_to(device)
    from megatron.core.process_groups_config import ProcessGroupCollection

    from fusion.training.backends.megatron_gpt import build_gpt

    groups = ProcessGroupCollection.use_mpu_process_groups()
    embd, groups.embd = groups.embd, None  # tied embeddings have no storage yet that could be made equal
    model = build_gpt(config, parallel, rank, groups, torch.float32)
    groups.embd = embd
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                stored = nn.Parameter(torch.zeros(param.shape, device=device.torch_device))
                stored.__dict__.update(param.__dict__)
                module._parameters[name] = stored
    return model


VERSION = "0.16.1"


def why_not() -> str | None:
    """Return why this interpreter cannot measure the peer, or None if it can."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "megatron-core is not installed"
    return None if installed == VERSION else f"megatron-core is {installed}, expected {VERSION}"


class Refit:
    """Holds both models of a pair of layouts on this rank and times their refit in either direction."""

    def __init__(self, config: ModelConfig, device: Device, *, one: Parallel, other: Parallel):
        self.device, self.rank = device, dist.get_rank()
        self.models, self.tables = [], []
        redirect_to(device)
        for parallel in (one, other):
            with megatron_layout(parallel):
                self.models.append(build_peer(config, parallel, self.rank, device))
            self.tables.append(local_params(config, parallel, self.rank))
        from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

        self.service = NCCLCopyService()
        for model in self.models:
            model.requires_grad_(False)
        fill(self.tables[0], self._views(0))

    def time(self, source: int, verify: bool = False) -> tuple[float, int]:
        """Refit from model ``source`` (0 or 1) to the other.

        Returns (seconds, peak bytes beyond both models on the worst rank).
        """
        from megatron.core.resharding.refit import swap_model_weights

        target = 1 - source
        if verify:
            for param in self.models[target].parameters():
                param.zero_()
        with _experts():
            self.device.reset_peak()
            before = self.device.memory().allocated
            seconds = wall(
                self.device, lambda: swap_model_weights(self.models[source], self.models[target], self.service)
            )
        peak = worst(self.device.memory().peak_allocated - before)
        if verify:
            check(self.tables[target], self._views(target))
        return seconds, peak

    def _views(self, which: int) -> dict[str, torch.Tensor]:
        return dict(self.models[which].named_parameters())


@contextmanager
def _experts() -> Iterator[None]:
    """Let the refit's planner know which parameters are experts, and their global numbers."""
    from megatron.core.resharding import planner, utils

    extract, resolve = utils.extract_param_metadata, utils.assign_ep_resolved_name_inplace

    def marked(param: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        param.allreduce = ".local_experts." not in name
        return extract(param, name, *args, **kwargs)

    def numbered(meta: Any, *, base_name: str | None = None) -> None:
        resolve(meta, base_name=base_name)
        group = meta.expert_parallel_group_ranks
        if group is not None:
            first = group.index(meta.owner_rank) * (meta.num_experts // len(group))
            meta.resolved_name = re.sub(
                r"(?<=\.local_experts\.)\d+", lambda number: str(first + int(number[0])), meta.resolved_name
            )

    with (
        patch.object(planner, "extract_param_metadata", marked),
        patch.object(utils, "assign_ep_resolved_name_inplace", numbered),
    ):
        yield
