"""Megatron-Core's model with its own storage and process groups, as a peer to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fusion.model import ModelConfig, Parallel
from fusion.npu import Device
from fusion.training.backends.megatron_device import redirect_to


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
