"""Keep what vLLM derives from `kv_b_proj` equal to it, where it attends to latents: on cards, not on the host.

    kv_b_proj.weight [N (P + V), L]    of this rank's N heads: P rows of keys, V of values each
      ├─► W_UK_T [N, P, L]             queries into the space of latents
      └─► W_UV   [N, L, V]             attended latents to values    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)

A switch writes the weight only. vLLM has views of it, which follow its storage: no memory, nothing to compute.
vllm-ascend has contiguous copies beside them: they are allocated before the KV cache (owner "weights") and released
with it, and each version of the weights overwrites them in place, so their addresses last as long as the KV cache."""

from typing import Any

import torch

from fusion.npu import Device

ABSORBED = ("W_UK_T", "W_UV")


def latent_layers(module: torch.nn.Module) -> dict[str, Any]:
    """Return vLLM's layers that attend to latents, by their paths."""
    return {path: layer for path, layer in module.named_modules() if hasattr(layer, ABSORBED[0])}


def absorbed(layer: Any) -> dict[str, torch.Tensor]:
    """Return the views of a layer's `kv_b_proj` that its tensors of these names must equal."""
    by_head = layer.kv_b_proj.weight.data.view(layer.num_heads, -1, layer.kv_lora_rank)
    keys, values = by_head.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    return dict(zip(ABSORBED, (keys, values.transpose(1, 2)), strict=True))


class AbsorbedLatents:
    """The derived tensors of a model of vLLM; none where it has no such layers. vLLM's own copies are freed."""

    def __init__(self, module: torch.nn.Module, device: Device):
        self._device, self._layers = device, [*latent_layers(module).values()]
        self._copies: list[tuple[Any, str, torch.Tensor]] = []
        """Layer, name and contiguous copy"""
        for layer in self._layers:
            for name in ABSORBED:
                theirs = getattr(layer.impl, name, None)
                if theirs is not None:
                    with device.owner("weights"):
                        copy = torch.empty(theirs.shape, dtype=theirs.dtype, device=theirs.device)
                    copy.untyped_storage().resize_(0)
                    setattr(layer.impl, name, copy)
                    self._copies.append((layer, name, copy))

    def follow(self) -> None:
        """Make the views those of the weights as they are stored now."""
        for layer in self._layers:
            for name, view in absorbed(layer).items():
                getattr(layer, name).data = view

    def write(self) -> None:
        """Overwrite the copies by the weights' values, after allocating them where they have been released."""
        with self._device.owner("weights"):
            for layer, name, copy in self._copies:
                if copy.untyped_storage().nbytes() == 0:
                    copy.untyped_storage().resize_(copy.nbytes)
                copy.copy_(absorbed(layer)[name])

    def release(self) -> None:
        for _, _, copy in self._copies:
            copy.untyped_storage().resize_(0)

    def addresses(self) -> list[int]:
        return [copy.data_ptr() for _, _, copy in self._copies]
