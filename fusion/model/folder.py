"""Read what a Hugging Face folder holds, from its files' headers, and refuse what would be loaded wrongly or not at
all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusion.model.config import ModelConfig, read_json
from fusion.model.hf_fields import Fields
from fusion.model.hf_quantization import BlockScales, read_quantization, scale_of
from fusion.model.table import global_params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F64", "F32", "BF16", "F16")
"""Element types that weights may be stored in, by their names in safetensors"""
FLOAT8, SCALE = "F8_E4M3", "F32"
"""Element types of a quantized matrix and of its scales (`hf_quantization`)"""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. ``dtype``: as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def check_folder(folder: str | Path, config: ModelConfig, key: str = "model.path") -> None:
    """Check, before any worker starts, that `load_weights` will find every tensor, and use every one that is there.

    Reads the files' headers only; of a tied model that stores an output head, the head and the embedding, too.

    Args:
        key: the user's config key that named the folder, for error messages.

    Raises:
        ValueError: the folder holds no weights or two sets of them, a file (named) is damaged, or a tensor (named) is
            missing, unknown, or of another shape or element type.
    """
    folder = Path(folder)
    stored, wanted = stored_tensors(folder, key), global_params(config)
    scales = block_scales(folder, stored, key)
    for name, shape in wanted.items():
        if name not in stored:
            raise ValueError(f"{key}: {folder} lacks the tensor {name!r}")
        check_tensor(stored, name, shape, scales, key)
    if config.tie_embeddings and HEAD in stored and not _equal(HEAD, EMBEDDING, stored):
        raise ValueError(
            f"{key}: {folder} holds {HEAD!r}, which differs from {EMBEDDING!r}; config.json sets "
            "tie_word_embeddings=true"
        )
    used = {*wanted, HEAD} if config.tie_embeddings else {*wanted}
    used |= {scale_of(name) for name in wanted if stored[name].dtype == FLOAT8}
    dropped = config.family_spec.dropped
    if dropped is not None:
        prefix = dropped.format(L=config.num_layers)
        used |= {name for name in stored if name.startswith(prefix)}
    if unknown := sorted(stored.keys() - used):
        more = f" and {len(unknown) - 1} other tensors" if len(unknown) > 1 else ""
        raise ValueError(
            f"{key}: {folder} holds {unknown[0]!r}{more}, which no part of the model that config.json describes uses"
        )


def block_scales(folder: Path, stored: Mapping[str, StoredTensor], key: str = "model.path") -> BlockScales | None:
    """Return how the float8 matrices of a folder are scaled, as its `config.json` says; None: it holds none, or does
    not say.

    Raises:
        ValueError: `config.json` states another quantization.
    """
    if all(tensor.dtype != FLOAT8 for tensor in stored.values()):
        return None
    path = folder / "config.json"
    return read_quantization(Fields(read_json(path, key), f"{key}: {path}"))


def check_tensor(
    stored: Mapping[str, StoredTensor],
    name: str,
    shape: tuple[int, ...],
    scales: BlockScales | None = None,
    key: str = "model.path",
) -> None:
    """Check one tensor of a folder against the model's table, and its scales, if it is quantized.

    Raises:
        ValueError: its shape or its element type, or scales that are missing or do not fit.
    """
    tensor = stored[name]
    if tensor.shape != shape:
        raise ValueError(
            f"{key}: {tensor.file} holds {name!r} with shape {list(tensor.shape)}; config.json implies {list(shape)}"
        )
    if tensor.dtype == FLOAT8 and scales is not None and len(shape) == 2:
        _check_scales(stored, name, scales.shape(shape), key)
    elif tensor.dtype not in DTYPES:
        raise ValueError(
            f"{key}: {tensor.file} holds {name!r} as {tensor.dtype}; expected one of {list(DTYPES)}, or a matrix in "
            f"{FLOAT8} with scales of blocks, which config.json states as quantization_config"
        )


def _check_scales(stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], key: str) -> None:
    scale = stored.get(scale_of(name))
    if scale is None:
        raise ValueError(f"{key}: {stored[name].file.parent} lacks {scale_of(name)!r}, the scales of {name!r}")
    if (scale.dtype, scale.shape) != (SCALE, shape):
        raise ValueError(
            f"{key}: {scale.file} holds {scale_of(name)!r} as {scale.dtype} {list(scale.shape)}; expected {SCALE} "
            f"{list(shape)}, one scale for each block of quantization_config.weight_block_size"
        )


def stored_tensors(folder: Path, key: str = "model.path") -> dict[str, StoredTensor]:
    """Map every tensor's name to where it is stored.

    Raises:
        ValueError: ``folder`` holds no weights, an index beside a single file, or a damaged file (named).
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{key}: {folder} holds neither {SINGLE} nor {INDEX}")
        return read_header(single, key)
    if single.is_file():
        raise ValueError(f"{key}: {folder} holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    files = read_json(index, key).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{key}: {index} has no weight_map")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, file in files.items():
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
    """Read the header of a safetensors file.

    Raises:
        ValueError: the file does not exist, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: StoredTensor(path, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key}: {path} is not a whole safetensors file: {error}") from None


def _equal(one: str, other: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether two stored matrices of the same type and shape hold the same elements. Reads `CHUNK_ROWS` at a time."""
    import torch
    from safetensors import safe_open

    left, right = stored[one], stored[other]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with safe_open(left.file, framework="pt") as ours, safe_open(right.file, framework="pt") as theirs:
        rows, other_rows = ours.get_slice(one), theirs.get_slice(other)
        spans = (slice(start, start + CHUNK_ROWS) for start in range(0, left.shape[0], CHUNK_ROWS))
        return all(torch.equal(rows[span], other_rows[span]) for span in spans)
