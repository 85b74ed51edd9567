"""The checkpoint of a card that trains: copied while it does nothing else, written while it trains on.

    card, or its host  ──copy──►  host memory of our own, pinned  ──write──►  checkpoint, Hugging Face folder
                        a pause                                    any thread, a process group of its own

The copy takes as much host memory as weights and optimizer together, from the first snapshot on. It shares no byte with
what later steps change, wherever the optimizer lives.

Invariant: `copy` and `write` take turns; what `write` writes is what the last `copy` saw, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion.model import save_folder
from fusion.npu import Device
from fusion.offload import HostPool
from fusion.training import TrainEngine, save_checkpoint
from fusion.training.checkpoint import replace_folder


class CheckpointWriter:
    """Of one card's trainer. ``group``: the cards that train, in their order, used for nothing else."""

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
        """What is to be written, or is being written"""

    def copy(self, state: Mapping[str, Any]) -> None:
        """Copies a `TrainEngine.state_dict` whose tensors lie in HBM or on the host; returns when they may be changed.

        Raises:
            RuntimeError: the host has no memory for the copy.
        """
        assert self._state is None, "the last snapshot was not written yet"
        live: Mapping[str, torch.Tensor] = state["tensors"]
        if not self._copies:
            regions = self._pool.take([tensor.nbytes for tensor in live.values()])
            self._copies = {
                name: _alone(region).view(live[name].dtype) for name, region in zip(live, regions, strict=True)
            }
        with torch.no_grad():
            for name, tensor in live.items():
                self._copies[name].copy_(tensor, non_blocking=True)
        self._device.current_stream().synchronize()
        self._state = {**state, "tensors": self._copies}

    def write(self, checkpoint: str, export: str) -> None:
        """Writes the copy. Collective over the cards that train; each folder appears whole or not at all.

        Raises:
            OSError: it could not be written here.
        """
        state, model = self._state, self._trainer.model
        assert state is not None, "there is no snapshot to write"
        save_checkpoint(self._trainer, checkpoint, state, self._group)
        views = self._trainer.weight_views(state)
        folder = Path(export)
        aside = folder.with_name(folder.name + ".partial")
        if model.mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        save_folder(model, aside, tokenizer_from=self._tokenizer_from, views=views, group=self._group)
        if model.mesh.rank == 0:
            replace_folder(aside, folder)
        self._state = None


def _alone(region: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: of a slice, `torch.save` writes all it was cut from."""
    return torch.from_numpy(region.numpy())
