"""Write chunks of global tensors to safetensors files (`chunk_reader.py` reads them).

    rank-00000.safetensors   the chunks that rank 0 owns, each a tensor of the name `Chunk.key`
    rank-00001.safetensors   …
    tensors.json             name of every global tensor → dtype, shape, and its chunks: rank, offset, shape

Files are written here instead of by `safetensors.save_file`, so that every byte is hashed as it is written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusion.telemetry.manifest import FileRecord, FileWriter
from fusion.training.chunks import Chunk

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Element types by their names in safetensors"""
TENSORS = "tensors.json"

Table = dict[str, dict[str, Any]]
"""Name of a global tensor → `dtype`, `shape`, `chunks`: a list of `rank`, `offset`, `shape`."""


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> FileRecord:
    """Write chunks to a new safetensors file; return its record when it is on disk. Each tensor is contiguous.

    Raises:
        OSError: it could not be written.
    """
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
    """Describes the chunks of one rank's file."""
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


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, other in DTYPES.items() if other == dtype)
