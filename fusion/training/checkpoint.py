"""Save the trainer's state as global tensors, and load it in any layout and on any number of cards.

    rank-00000.safetensors, …   each rank's own chunks of `master/…`, `exp_avg/…`, `exp_avg_sq/…` (float32; what is not
                                trained has only the first, in its own dtype)
    tensors.json                which chunk of which global tensor is in which file
    trainer.json                steps, dtype, layout, model with its masked ids, and schedule of the learning rate;
                                rank, factor and targets of adapters, whose base is not saved
    manifest.json               sizes and digests of these files, written last

Every element is saved once, by the rank whose optimizer owns it; the weights are not saved, as they are the masters,
rounded. A rank loads the boxes of its own shard, whoever saved them, and publishes the weights to its replicas as after
a step. So a resume in the same layout is bitwise, and in another layout the global tensors are bitwise the same.

A checkpoint is written atomically: all ranks write into a temporary folder, which is renamed when its manifest is on
disk; an older one of the same name is replaced in the same operation (`replace_folder`). Each rank hashes what it
writes while it writes it.

To continue training while it is written, copy the state and write the copy in another thread, over a separate process
group. `torch.distributed.checkpoint.async_save` is not suitable: it copies states that are on the host already, and its
collectives exchange pickles."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusion.model.adapters import Adapters
from fusion.npu.all_or_none import all_or_none
from fusion.telemetry.files import replace_folder, sync, write_atomic
from fusion.telemetry.manifest import FileRecord, find_damage, read_manifest, write_manifest
from fusion.training.chunk_files import TENSORS, ChunkFolder, file_of, merge_tables, read_chunks, table_of, write_chunks
from fusion.training.interface import TrainEngine
from fusion.training.schedule import Schedule

TRAINER = "trainer.json"
NOT_COMPUTED_WITH = {"dtype", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings"}
"""Fields of a model's config that do not change what it computes"""


def save_checkpoint(
    trainer: TrainEngine,
    folder: str | Path,
    state: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write masters, moments and step. Collective over the mesh; all ranks must see the same file system. Return when
    everything is on disk.

    An older checkpoint of the same name is kept until the new one is complete. ``state``: a copy of the trainer's
    `state_dict` on the host that does not change; any thread may write it. None: the trainer's current state.
    ``group``: over the ranks of the mesh in their order, not in use elsewhere during the call. None: the mesh's group.
    Raise OSError: this rank could not write. The other ranks wait for it until their group's timeout."""
    folder, mesh = Path(folder), trainer.model.mesh
    group = group if group is not None else mesh.world_group
    partial = folder.with_name(folder.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(group)
    state = trainer.state_dict() if state is None else state
    owned = [chunk for chunk in trainer.chunks(state) if chunk.owned]
    record = write_chunks(partial / file_of(mesh.rank), owned)
    note = {"bytes": record.nbytes, "xxh3_128": record.xxh3_128, "tensors": table_of(mesh.rank, owned)}
    write_atomic(_note(partial, mesh.rank), json.dumps(note))
    _barrier(group)
    if mesh.rank == 0:
        _complete(trainer, partial, state["steps"], state["skipped_in_a_row"])
        replace_folder(partial, folder)
    _barrier(group)


def load_checkpoint(
    trainer: TrainEngine, folder: str | Path, verify: bool = True, steps_left: int | None = None
) -> None:
    """Load a saved state into a trainer of any layout, bitwise. Collective over the mesh.
    ``verify``: read all files first and compare them with the manifest; the ranks share the work.
    ``steps_left``: optimizer steps until the end of the run, for a schedule that changes; None: as configured.
    Raise ValueError: there is no checkpoint, or it is of another model or dtype.
    Raise AbortedOnAllRanks: on all ranks, if a file is damaged or could not be read. The trainer must not be used."""
    folder, mesh = Path(folder), trainer.model.mesh
    saved = read_trainer(folder)
    dtype = _dtype(trainer)
    if saved["dtype"] != dtype:
        raise ValueError(f"model.dtype={dtype}: {folder} was saved with model.dtype={saved['dtype']}")
    _check_model(saved["model"], trainer.model.config.to_hf(dtype), folder)
    if (adapters := adapters_in(saved)) != (own := trainer.model.config.adapters):
        raise ValueError(f"training.lora: {folder} has {adapters or 'no adapters'}; this run has {own or 'none'}")

    def check() -> None:
        damage = find_damage(folder, sorted(read_manifest(folder).files)[mesh.rank :: mesh.parallel.world])
        if damage is not None:
            raise ValueError(f"{folder} is damaged: {damage}")

    def read() -> None:
        read_chunks(ChunkFolder(folder), trainer.chunks(trainer.state_dict()))

    if verify:
        all_or_none(check, group=mesh.world_group, rank=mesh.rank, stage="restore")
    all_or_none(read, group=mesh.world_group, rank=mesh.rank, stage="restore")
    trainer.resume_at(saved["steps"], saved.get("skipped_in_a_row", 0))
    if known := saved.get("schedule"):
        trainer.schedule = trainer.schedule.resumed(Schedule(**known), saved["steps"], steps_left)


def read_trainer(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint says about itself: `steps`, `dtype`, `layout`, `model` (a Hugging Face config),
    `masked_ids` (of `ModelConfig`) and `skipped_in_a_row` (both absent if an earlier version wrote it); `adapters`, if
    they alone are trained.
    Raise ValueError: there is no checkpoint, or one of an earlier version."""
    if not (folder / TRAINER).is_file():
        raise ValueError(f"{folder} holds no trainer checkpoint ({TRAINER} is missing)")
    saved = json.loads((folder / TRAINER).read_text())
    if not (folder / TENSORS).is_file():
        raise ValueError(
            f"{folder} was written by an earlier version, in a format that is not read any more; start from the "
            "exported model"
        )
    return saved


def adapters_in(saved: dict[str, Any]) -> Adapters | None:
    """Return the adapters of what `read_trainer` has read; None: all weights are trained."""
    stated = saved.get("adapters")
    return None if stated is None else Adapters(stated["rank"], stated["alpha"], tuple(stated["targets"]))


def _check_model(saved: dict[str, Any], own: dict[str, Any], folder: Path) -> None:
    for key in own.keys() - NOT_COMPUTED_WITH:
        if saved.get(key) != json.loads(json.dumps(own[key])):
            raise ValueError(
                f"model.path: {folder} was saved by a model with {key}={saved.get(key)!r}; this run's has {own[key]!r}"
            )


def _complete(trainer: TrainEngine, partial: Path, steps: int, skipped_in_a_row: int) -> None:
    """Merge the ranks' notes and write all other files, the manifest last."""
    world = trainer.model.mesh.parallel.world
    notes = [json.loads(_note(partial, rank).read_text()) for rank in range(world)]
    records = {file_of(rank): FileRecord(note["bytes"], note["xxh3_128"]) for rank, note in enumerate(notes)}
    write_atomic(partial / TENSORS, json.dumps(merge_tables(note["tensors"] for note in notes)))
    dtype, config = _dtype(trainer), trainer.model.config
    about = {
        "steps": steps,
        "skipped_in_a_row": skipped_in_a_row,
        "dtype": dtype,
        "layout": asdict(trainer.model.mesh.parallel),
        "model": config.to_hf(dtype),
        "masked_ids": config.masked_ids,
        "schedule": asdict(trainer.schedule),
    }
    if config.adapters:
        about["adapters"] = asdict(config.adapters)
    write_atomic(partial / TRAINER, json.dumps(about) + "\n")
    for name in (TENSORS, TRAINER):
        sync(partial / name)
    for rank in range(world):
        _note(partial, rank).unlink()
    write_manifest(partial, records)


def _dtype(trainer: TrainEngine) -> str:
    return str(trainer.model.weights.dtype).removeprefix("torch.")


def _note(partial: Path, rank: int) -> Path:
    """Return the path of a rank's note to rank 0 about its file."""
    return partial / f"rank-{rank:05d}.json"


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group=group)
