"""Read any boxes of the global tensors that `chunk_files.py` has written, through torch.distributed.checkpoint.

Which reads fill a box is decided by `create_read_items_for_chunk_list` of torch.distributed.checkpoint, and the reader
is one of its `StorageReader`s, so `torch.distributed.checkpoint.load` reads such a folder, too, into tensors of any
sharding. Its own formats are not used: `.metadata` is a pickle, which runs code when it is loaded, and its safetensors
format stores one box of a tensor per file, whereas a range of a flat shard is up to three. Its collectives, which
exchange pickles, are not needed either: every rank plans its reads from the same file.

Imported only to load a checkpoint, as torch.distributed.checkpoint takes long to import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, ReadItem, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from fusion.training.chunk_files import DTYPES, TENSORS, Table, file_of
from fusion.training.chunks import Chunk, key_of


def read_chunks(reader: ChunkReader, chunks: Sequence[Chunk]) -> None:
    """Fills the tensors of ``chunks``, of any dtype, from the global tensors that ``reader`` has.

    Raises:
        ValueError: a tensor is missing, has another shape, or was not saved as a whole; or a file is damaged.
        OSError: a file could not be read.
    """
    planner, metadata = _ChunkLoadPlanner(), reader.read_metadata()
    planner.set_up_planner({"chunks": chunks}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner)


class ChunkReader(StorageReader):
    """Reads global tensors from a folder of `write_chunks` files."""

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
            self._files: dict[int, Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads exactly the boxes of the plan, file by file."""
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_rank.setdefault(self._chunk(item.storage_index)["rank"], []).append(item)
        for rank, items in sorted(by_rank.items()):
            try:
                if rank not in self._files:  # stays open: an export reads a file once per tensor
                    self._files[rank] = safe_open(self.folder / file_of(rank), framework="pt")
                for item in items:
                    self._read(self._files[rank], item, planner)
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file_of(rank)} is damaged: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        chunk = self._chunk(item.storage_index)
        key = key_of(item.storage_index.fqn, chunk["offset"])
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        box = tuple(slice(start, start + length) for start, length in ends)
        with torch.no_grad():
            target = planner.resolve_tensor(item)
            target.copy_(file.get_slice(key)[box])
        planner.commit_tensor(item, target)

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


class _ChunkLoadPlanner(LoadPlanner):
    """Plans the reads that fill ``state_dict["chunks"]``."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata
        self._chunks: dict[str, list[Chunk]] = {}
        for chunk in state_dict["chunks"]:
            self._chunks.setdefault(chunk.name, []).append(chunk)

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, chunks in self._chunks.items():
            stored = self._stored.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"the checkpoint lacks {name!r}")
            if tuple(stored.size) != chunks[0].shape:
                raise ValueError(f"{name!r} has the shape {list(stored.size)}, expected {list(chunks[0].shape)}")
            boxes = [ChunkStorageMetadata(torch.Size(chunk.offset), chunk.tensor.shape) for chunk in chunks]
            reads = create_read_items_for_chunk_list(name, stored, boxes)
            if sum(read.lengths.numel() for read in reads) != sum(chunk.tensor.numel() for chunk in chunks):
                raise ValueError(f"{name!r} was not saved as a whole")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index
        assert index is not None
        tensor = self._chunks[read_item.dest_index.fqn][index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
