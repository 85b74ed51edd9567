"""Write the checkpoint of a card that trains: copy its state in a pause, and write the copy while training continues.

    card, or its host  ──copy──►  separate pinned host memory  ──write──►  checkpoint, Hugging Face folder
                        pause                                   any thread, with a separate process group

From the first snapshot on, the copy takes as much host memory as weights and optimizer together. It shares no memory
with tensors that later steps change.

Invariant: `copy` and `write` alternate; `write` writes the state of the last `copy`, bitwise."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fusion.model import save_folder
from fusion.npu import Device
from fusion.offload import HostPool
from fusion.training import TrainEngine, save_checkpoint


class CheckpointWriter:
    """Writes the checkpoints of one card's trainer. ``group``: the cards that train, in order; used here only."""

    def __init__(
        self,
        *,
        trainer: TrainEngine,
        device: Device,
        pool: HostPool,
        group: dist.ProcessGroup | None,
        tokenizer_from: str,
    ):
        self._trainer, self._device, self._pool, self._group = trainer, device, pool, group
        self._tokenizer_from = tokenizer_from
        self._copies: dict[str, torch.Tensor] = {}
        self._state: dict[str, Any] | None = None
        """The state to be written, or being written"""

    def copy(self, state: Mapping[str, Any]) -> None:
        """Copy a `TrainEngine.state_dict` with tensors in HBM or on the host; return when they may be changed. Raise
        RuntimeError if the host does not have enough memory for the copy."""
        assert self._state is None, "the last snapshot has not been written yet"
        live: Mapping[str, torch.Tensor] = state["tensors"]
        if not self._copies:
            regions = self._pool.take([tensor.nbytes for tensor in live.values()])
            self._copies = {name: region.view(live[name].dtype) for name, region in zip(live, regions, strict=True)}
        with torch.no_grad():
            for name, tensor in live.items():
                self._copies[name].copy_(tensor, non_blocking=True)
        self._device.current_stream().synchronize()
        self._state = {**state, "tensors": self._copies}

    def write(self, checkpoint: str, export: str) -> None:
        """Write the copy, each folder atomically. Collective over the cards that train. Raise OSError if this card
        could not write."""
        state, model = self._state, self._trainer.model
        assert state is not None, "there is no snapshot to write"
        save_checkpoint(self._trainer, checkpoint, state=state, group=self._group)
        views = self._trainer.weight_views(state)
        save_folder(model, export, tokenizer_from=self._tokenizer_from, views=views, group=self._group)
        self._state = None
