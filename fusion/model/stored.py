"""Read which tensors the files of a Hugging Face folder hold, from their headers."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. ``dtype``: as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint folder.
    Raise ValueError: the file does not exist, or holds something else (named, with the config key)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{key}: {path} does not exist; expected a Hugging Face checkpoint folder. A model of the hub is "
            "fetched by HF_HUB_OFFLINE=0 hf download NAME --local-dir FOLDER"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{key}: {path} holds a {type(content).__name__}; expected a JSON object")
    return content


def tensor_names(folder: Path, key: str = "model.path") -> frozenset[str] | None:
    """Return the names of a folder's tensors, from its index where it has one; None: it holds no weights.
    Raise ValueError: a file (named) is damaged."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return frozenset(_weight_map(index, key))
    return frozenset(read_header(single, key)) if single.is_file() else None


def stored_tensors(folder: Path, key: str = "model.path") -> dict[str, StoredTensor]:
    """Map every tensor's name to where it is stored.
    Raise ValueError: ``folder`` holds no weights, an index beside a single file, or a damaged file (named)."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{key}: {folder} holds neither {SINGLE} nor {INDEX}")
        return read_header(single, key)
    if single.is_file():
        raise ValueError(f"{key}: {folder} holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, file in _weight_map(index, key).items():
        if not isinstance(file, str) or os.path.basename(file) != file:
            raise ValueError(f"{key}: {index} places {name!r} in {file!r}; expected the name of a file of the folder")
        if file not in headers:
            headers[file] = read_header(folder / file, key)
        if name not in headers[file]:
            raise ValueError(f"{key}: {index} places {name!r} in {file}, which does not hold it")
    stored: dict[str, StoredTensor] = {}
    for header in headers.values():
        if twice := stored.keys() & header.keys():
            raise ValueError(f"{key}: {folder} holds {min(twice)!r} in two files")
        stored |= header
    return stored


def read_header(path: Path, key: str = "model.path") -> dict[str, StoredTensor]:
    """Read the header of a safetensors file. Raise ValueError: the file does not exist, or is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: StoredTensor(path, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key}: {path} is not a whole safetensors file: {error}") from None


def _weight_map(index: Path, key: str) -> dict[str, Any]:
    files = read_json(index, key).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{key}: {index} has no weight_map")
    return files
