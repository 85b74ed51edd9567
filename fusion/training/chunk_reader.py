"""Read any boxes of the global tensors that `chunk_files.py` has written.

The reader is a `StorageReader` of torch.distributed.checkpoint, so `torch.distributed.checkpoint.load` reads such a
folder, too, into tensors of any sharding. Its own formats are not used: `.metadata` is a pickle, which runs code when
it is loaded, and its safetensors format stores one box of a tensor per file, whereas a range of a flat shard is up to
three. Its collectives, which exchange pickles, are not needed either: every rank plans its reads from the same file.

Imported only to load a checkpoint, as torch.distributed.checkpoint takes long to import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from fusion.model.boxes import Box, intersect, numel
from fusion.training.chunk_files import DTYPES, TENSORS, Table, file_of
from fusion.training.chunks import Chunk, key_of


@torch.no_grad()
def read_chunks(reader: ChunkReader, chunks: Iterable[Chunk]) -> None:
    """Fill the tensors of ``chunks``, of any dtype, from the global tensors that ``reader`` has.

    Raises:
        ValueError: a tensor is missing, has another shape, or was not saved as a whole; or a file is damaged.
        OSError: a file could not be read.
    """
    for chunk in chunks:
        entry = reader.table.get(chunk.name)
        if entry is None:
            raise ValueError(f"the checkpoint lacks {chunk.name!r}")
        if tuple(entry["shape"]) != chunk.shape:
            raise ValueError(f"{chunk.name!r} has the shape {entry['shape']}, expected {list(chunk.shape)}")
        box, num_read = _box(chunk.offset, chunk.tensor.shape), 0
        for stored in entry["chunks"]:
            if hit := intersect(box, _box(stored["offset"], stored["shape"])):
                chunk.tensor[_within(hit, chunk.offset)] = reader.read(chunk.name, stored, hit)
                num_read += numel(hit)
        if num_read != chunk.tensor.numel():
            raise ValueError(f"{chunk.name!r} was not saved as a whole")


class ChunkReader(StorageReader):
    """Read global tensors from a folder of `write_chunks` files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.reset(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / TENSORS).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
            self.table: Table = json.loads((self.folder / TENSORS).read_text())
            self._metadata = Metadata({name: _metadata_of(entry) for name, entry in self.table.items()})
            self._files: dict[Path, Any] = {}

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
            target.copy_(self.read(item.storage_index.fqn, stored, _box(at, item.lengths)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, name: str, stored: Mapping[str, Any], box: Box) -> torch.Tensor:
        """Read the elements ``box`` of the global tensor ``name``, and nothing around them, from the ``stored`` chunk
        that contains them.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.folder / file_of(stored["rank"])
        try:
            if path not in self._files:  # stays open: an export reads a file once per tensor
                self._files[path] = safe_open(path, framework="pt")
            key = key_of(name, stored["offset"])
            return self._files[path].get_slice(key)[_within(box, stored["offset"])]
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def _chunk(self, index: MetadataIndex) -> Mapping[str, Any]:
        chunks = self.table[index.fqn]["chunks"]
        if index.index is not None:
            return chunks[index.index]
        return next(chunk for chunk in chunks if tuple(chunk["offset"]) == tuple(index.offset or ()))


def _metadata_of(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk["offset"]), torch.Size(chunk["shape"])) for chunk in entry["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks)


def _box(offset: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _within(box: Box, offset: Sequence[int]) -> tuple[slice, ...]:
    """Return the place of a box in a tensor that begins at ``offset``."""
    return tuple(slice(start - base, stop - base) for (start, stop), base in zip(box, offset, strict=True))
