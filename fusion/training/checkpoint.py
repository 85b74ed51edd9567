"""The trainer's state on disk: one file a rank, and a bitwise resume in the layout it was saved in.

A checkpoint appears whole or not at all: all ranks write into a folder beside it, which takes its name when the last
has finished. (Weights for other layouts and other programs are what `fusion.model.save_folder` exports.)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from fusion.training.engine import TrainEngine

MANIFEST = "trainer.json"


def save_checkpoint(engine: TrainEngine, folder: str | Path) -> None:
    """Writes weights, optimizer and step. Collective over the mesh; all ranks see the same file system.

    An older checkpoint of that name stays until the new one is whole.
    """
    folder, mesh = Path(folder), engine.mesh
    aside = folder.with_name(folder.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier(engine)
    state = engine.state_dict()
    # Whole copies: a state that lives on the host is a slice of a larger region, all of which would be written.
    state["tensors"] = {name: tensor.to("cpu", copy=True) for name, tensor in state["tensors"].items()}
    torch.save(state, aside / _file(mesh.rank))
    if mesh.rank == 0:
        (aside / MANIFEST).write_text(json.dumps({"layout": _layout(engine), "steps": state["steps"]}) + "\n")
    _barrier(engine)
    if mesh.rank == 0:
        _replace(aside, folder)
    _barrier(engine)


def load_checkpoint(engine: TrainEngine, folder: str | Path) -> None:
    """Puts a saved state back, bit for bit. Every rank reads its own file.

    Raises:
        ValueError: there is no checkpoint, or it was saved in another layout.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no trainer checkpoint ({MANIFEST} is missing)")
    saved = json.loads((folder / MANIFEST).read_text())["layout"]
    if saved != _layout(engine):
        raise ValueError(
            f"parallel.train: {folder} was saved in the layout {saved}, this run trains in {_layout(engine)}; "
            "resume in the same layout, or start from the exported model"
        )
    engine.load_state_dict(torch.load(folder / _file(engine.mesh.rank), map_location="cpu", weights_only=True))


def _layout(engine: TrainEngine) -> dict[str, int]:
    parallel = engine.layout()
    return {axis: getattr(parallel, axis) for axis in ("world", "tp", "ep", "pp", "etp")}


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _replace(aside: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _barrier(engine: TrainEngine) -> None:
    if engine.mesh.world_group is not None:
        dist.barrier(group=engine.mesh.world_group)
