"""Read the experts that vLLM records of every token, cell by cell of its KV cache.

    routers ─► vLLM's capturer: experts of a step's tokens ─► its scheduler, by the places of their KV ─► `VllmRouting`

Where vLLM computes on the host its routers do not report to the capturer; there our experts do (`vllm_host`)."""

import numpy as np
import torch

from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.sequence import Blocks
from fusion.model import ModelConfig, routing_dtype


def sparse_layers(config: ModelConfig) -> list[int]:
    """Return the indices of the layers that have experts; vLLM's records have all layers."""
    return [layer for layer in range(config.num_layers) if config.sparse(range(layer, layer + 1))]


class VllmRouting:
    """Implement `RecordedRouting`."""

    def __init__(self, core: VllmCore, config: ModelConfig):
        self._core = core
        self._layers = sparse_layers(config)
        self._dtype, self._top_k = routing_dtype(config.num_experts), config.top_k

    def read(self, blocks: Blocks, start: int, end: int) -> torch.Tensor:
        """Return the routing [end - start, layers, k] of the tokens ``start:end`` of the sequence in these blocks."""
        experts: np.ndarray = self._core.scheduler.routed_experts_mgr.get(list(blocks), end, start)
        return torch.from_numpy(experts[:, self._layers].astype(np.int32)).to(self._dtype)

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Return results of `read` one behind the other."""
        empty = torch.empty(0, len(self._layers), self._top_k, dtype=self._dtype)
        return torch.cat(pieces) if pieces else empty
