"""Write chunks of global tensors to safetensors files, and read any boxes of these tensors.

    rank-00000.safetensors   the chunks that rank 0 owns, each a tensor of the name `Chunk.key`
    rank-00001.safetensors   …
    tensors.json             name of every global tensor → dtype, shape, and its chunks: rank, offset, shape

Files are written here instead of by `safetensors.save_file`, so that every byte is hashed as it is written. The formats
of torch.distributed.checkpoint are not used: `.metadata` is a pickle, which runs code when it is loaded, and its
safetensors format stores one box of a tensor per file, whereas a range of a flat shard is up to three. Its collectives,
which exchange pickles, are not needed either: every rank plans its reads from the same file. Its `load` can read a
folder, too (`chunk_reader.py`)."""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fusion.model.boxes import Box, intersect, numel
from fusion.telemetry.manifest import FileRecord, FileWriter

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Element types by their names in safetensors"""
TENSORS = "tensors.json"

Table = dict[str, dict[str, Any]]
"""Name of a global tensor → `dtype`, `shape`, `chunks`: a list of `rank`, `offset`, `shape`."""


@dataclass(frozen=True)
class Chunk:
    """A part of a checkpoint: the box of the global tensor ``name`` of ``shape`` that begins at ``offset`` and has the
    shape of ``tensor``.

    ``owned``: this rank saves it; every rank loads all of its chunks."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    owned: bool = True

    @property
    def key(self) -> str:
        """Identify the chunk in its file."""
        return key_of(self.name, self.offset)


def key_of(name: str, offset: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> FileRecord:
    """Write chunks to a new safetensors file; return its record when it is on disk. Each tensor is contiguous.
    Raise OSError: it could not be written."""
    header, end = dict[str, Any](), 0
    for chunk in chunks:
        begin, end = end, end + chunk.tensor.nbytes
        assert chunk.key not in header, f"{chunk.key} would be written twice"
        dtype, shape = _dtype_name(chunk.tensor.dtype), list(chunk.tensor.shape)
        header[chunk.key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers may expect aligned data
    file = FileWriter(path, 8 + len(text) + end)
    try:
        file.write(struct.pack("<Q", len(text)) + text)
        for chunk in chunks:
            flat = chunk.tensor.detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)
        return file.close()
    finally:
        file.abort()


def table_of(rank: int, chunks: Iterable[Chunk]) -> Table:
    """Describe the chunks of one rank's file."""
    table: Table = {}
    for chunk in chunks:
        entry = {"dtype": _dtype_name(chunk.tensor.dtype), "shape": list(chunk.shape), "chunks": []}
        box = {"rank": rank, "offset": list(chunk.offset), "shape": list(chunk.tensor.shape)}
        table.setdefault(chunk.name, entry)["chunks"].append(box)
    return table


def merge_tables(tables: Iterable[Table]) -> Table:
    """Merge the tables of several files."""
    merged: Table = {}
    for table in tables:
        for name, entry in table.items():
            merged.setdefault(name, entry | {"chunks": []})["chunks"].extend(entry["chunks"])
    return merged


class ChunkFolder:
    """Hold the open files of a folder of `write_chunks` files, and its table."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.table: Table = json.loads((self.folder / TENSORS).read_text())
        self._files: dict[Path, Any] = {}

    def read(self, name: str, stored: Mapping[str, Any], box: Box) -> torch.Tensor:
        """Read the elements ``box`` of the global tensor ``name``, and nothing around them, from the ``stored`` chunk
        that contains them.
        Raise ValueError: the file is damaged."""
        path = self.folder / file_of(stored["rank"])
        try:
            if path not in self._files:  # stays open: an export reads a file once per tensor
                self._files[path] = safe_open(path, framework="pt")
            key = key_of(name, stored["offset"])
            return self._files[path].get_slice(key)[_within(box, stored["offset"])]
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


@torch.no_grad()
def read_chunks(folder: ChunkFolder, chunks: Iterable[Chunk]) -> None:
    """Fill the tensors of ``chunks``, of any dtype, from the global tensors that ``folder`` has.
    Raise ValueError: a tensor is missing, has another shape, or was not saved as a whole; or a file is damaged.
    Raise OSError: a file could not be read."""
    for chunk in chunks:
        entry = folder.table.get(chunk.name)
        if entry is None:
            raise ValueError(f"the checkpoint lacks {chunk.name!r}")
        if tuple(entry["shape"]) != chunk.shape:
            raise ValueError(f"{chunk.name!r} has the shape {entry['shape']}, expected {list(chunk.shape)}")
        box, num_read = box_of(chunk.offset, chunk.tensor.shape), 0
        for stored in entry["chunks"]:
            if hit := intersect(box, box_of(stored["offset"], stored["shape"])):
                chunk.tensor[_within(hit, chunk.offset)] = folder.read(chunk.name, stored, hit)
                num_read += numel(hit)
        if num_read != chunk.tensor.numel():
            raise ValueError(f"{chunk.name!r} was not saved as a whole")


def box_of(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box of this shape that begins at ``offset``."""
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _within(box: Box, offset: Sequence[int]) -> tuple[slice, ...]:
    """Return the place of a box in a tensor that begins at ``offset``."""
    return tuple(slice(start - base, stop - base) for (start, stop), base in zip(box, offset, strict=True))


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, other in DTYPES.items() if other == dtype)
