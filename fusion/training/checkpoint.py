"""Save and load the trainer's state: one file per rank, for a bitwise resume in the layout it was saved in.

A checkpoint is written atomically: all ranks write into a temporary folder, which is renamed when the last rank has
synced its file. (`fusion.model.save_folder` exports weights for other layouts and other programs.)

To continue training while it is written, copy the state and write the copy in another thread, over a separate process
group. `torch.distributed.checkpoint.async_save` is not suitable: it treats tensors of the same name on several ranks as
replicas, whereas these are flat pieces of each rank; it also copies states that are on the host already.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion.telemetry.files import sync
from fusion.training.interface import TrainEngine

MANIFEST = "trainer.json"


def save_checkpoint(
    trainer: TrainEngine,
    folder: str | Path,
    state: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes weights, optimizer and step. Collective over the mesh; all ranks must see the same file system. Returns
    when everything is on disk.

    An older checkpoint of the same name is kept until the new one is complete.

    Args:
        state: a copy of the trainer's `state_dict` on the host that does not change, each tensor with separate storage;
            any thread may write it. None: the trainer's current state.
        group: over the ranks of the mesh in their order, not in use elsewhere during the call. None: the mesh's group.

    Raises:
        OSError: this rank could not write. The other ranks wait for it until their group's timeout.
    """
    folder, mesh = Path(folder), trainer.model.mesh
    group = group if group is not None else mesh.world_group
    partial = folder.with_name(folder.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(group)
    if state is None:
        state = trainer.state_dict()
        # Copies, because a state on the host is a slice of a larger region, all of which would be written.
        state["tensors"] = {name: tensor.to("cpu", copy=True) for name, tensor in state["tensors"].items()}
    torch.save(state, partial / _file(mesh.rank))
    sync(partial / _file(mesh.rank))
    if mesh.rank == 0:
        (partial / MANIFEST).write_text(json.dumps({"layout": _layout(trainer), "steps": state["steps"]}) + "\n")
        sync(partial / MANIFEST)
    _barrier(group)
    if mesh.rank == 0:
        replace_folder(partial, folder)
    _barrier(group)


def load_checkpoint(trainer: TrainEngine, folder: str | Path) -> None:
    """Loads a saved state bitwise. Every rank reads its own file.

    Raises:
        ValueError: there is no checkpoint, or it was saved in another layout.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no trainer checkpoint ({MANIFEST} is missing)")
    saved = json.loads((folder / MANIFEST).read_text())["layout"]
    if saved != _layout(trainer):
        raise ValueError(
            f"parallel.train: {folder} was saved in the layout {saved}, this run trains in {_layout(trainer)}; "
            "resume in the same layout, or start from the exported model"
        )
    trainer.load_state_dict(torch.load(folder / _file(trainer.model.mesh.rank), map_location="cpu", weights_only=True))


def _layout(trainer: TrainEngine) -> dict[str, int]:
    parallel = trainer.model.mesh.parallel
    return {axis: getattr(parallel, axis) for axis in ("world", "tp", "ep", "pp", "etp")}


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def replace_folder(new: Path, folder: Path) -> None:
    """Renames ``new`` to ``folder`` durably, and deletes the previous folder of that name."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    sync(new)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group=group)
