"""Redirect Megatron-Core's calls of `torch.cuda` to the card that computes.

Megatron asks `torch.cuda` for the current device and for streams, in forward and in backward passes. On a CUDA card
this is correct; on Ascend, MindSpeed redirects these calls; on an emulated card `redirect_to` does. A worker computes
on one card, so the redirection lasts until a model is created on another card of the process."""

import importlib.util
import warnings
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fusion.model.collectives import gather_shards, reduce_scatter_shards
from fusion.npu import Device

_redirection = ExitStack()
_redirected_to: torch.device | None = None


def redirect_to(device: Device) -> None:
    """Make Megatron-Core compute on ``device``; imports it. Raise ImportError: megatron-core is not installed."""
    global _redirected_to
    if importlib.util.find_spec("mindspeed") is not None:
        import mindspeed.megatron_adaptor  # noqa: F401  (patches Megatron: before its first import)

        return
    if device.torch_device.type == "cuda" or device.torch_device == _redirected_to:
        return
    _redirection.close()
    _redirect(device)
    _redirected_to = device.torch_device


def _redirect(device: Device) -> None:
    module = torch.get_device_module(device.torch_device)
    stand_ins: dict[str, Any] = {
        name: getattr(module, name) for name in ("Event", "Stream", "current_stream", "stream")
    }
    stand_ins["current_device"] = lambda: device.torch_device
    _redirection.enter_context(patch.multiple(torch.cuda, **stand_ins))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and Apex, which need CUDA
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    gather = token_dispatcher.gather_from_sequence_parallel_region
    scatter = token_dispatcher.reduce_scatter_to_sequence_parallel_region

    def gather_rows(x: torch.Tensor, *args: Any, group: Any, output_split_sizes: Any = None) -> torch.Tensor:
        if output_split_sizes is None or dist.get_world_size(group) == 1:
            return gather(x, *args, group=group)
        return gather_shards(x, output_split_sizes, group)

    def scatter_rows(x: torch.Tensor, *args: Any, group: Any, input_split_sizes: Any = None) -> torch.Tensor:
        if input_split_sizes is None or dist.get_world_size(group) == 1:
            return scatter(x, *args, group=group)
        return reduce_scatter_shards(x, input_split_sizes, group)

    in_dispatcher: dict[str, Any] = {
        "maybe_move_tensor_to_cpu": _move_to_cpu,  # its own only moves tensors of CUDA cards
        "gather_from_sequence_parallel_region": gather_rows,  # gloo gathers only equal shares
        "reduce_scatter_to_sequence_parallel_region": scatter_rows,
    }
    _redirection.enter_context(patch.multiple(token_dispatcher, **in_dispatcher))
    # 0.16.1 reads this name, but defines it only if Transformer Engine is installed.
    _redirection.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()
