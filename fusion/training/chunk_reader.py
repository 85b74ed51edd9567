"""Read a folder that `chunk_files.py` has written through torch.distributed.checkpoint, into tensors of any sharding:

torch.distributed.checkpoint.load(tensors, storage_reader=ChunkReader(FOLDER))"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from fusion.training.chunk_files import DTYPES, TENSORS, ChunkFolder, box_of


class ChunkReader(StorageReader):
    """Read global tensors from a folder of `write_chunks` files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.reset(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / TENSORS).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = ChunkFolder(checkpoint_id)
            self._metadata = Metadata({name: _metadata_of(entry) for name, entry in self.folder.table.items()})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored, target = self._chunk(item.storage_index), planner.resolve_tensor(item)
            at = [base + first for base, first in zip(stored["offset"], item.storage_offsets, strict=True)]
            target.copy_(self.folder.read(item.storage_index.fqn, stored, box_of(at, item.lengths)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, index: MetadataIndex) -> Mapping[str, Any]:
        chunks = self.folder.table[index.fqn]["chunks"]
        if index.index is not None:
            return chunks[index.index]
        return next(chunk for chunk in chunks if tuple(chunk["offset"]) == tuple(index.offset or ()))


def _metadata_of(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk["offset"]), torch.Size(chunk["shape"])) for chunk in entry["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks)
