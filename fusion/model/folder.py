"""Read what a Hugging Face folder holds, from its files' headers, and refuse what would be loaded wrongly or not at
all."""

from collections.abc import Mapping
from pathlib import Path

from fusion.model.config import ModelConfig
from fusion.model.hf_fields import Fields
from fusion.model.hf_quantization import BlockScales, read_quantization, scale_of
from fusion.model.stored import StoredTensor, read_json, stored_tensors
from fusion.model.table import EMBEDDING, HEAD, global_params

DTYPES = ("F64", "F32", "BF16", "F16")
"""Element types that weights may be stored in, by their names in safetensors"""
FLOAT8, SCALE = "F8_E4M3", "F32"
"""Element types of a quantized matrix and of its scales (`hf_quantization`)"""
CHUNK_ROWS = 4096


def check_folder(folder: str | Path, config: ModelConfig, key: str = "model.path") -> None:
    """Check, before any worker starts, that `load_weights` will find every tensor, and use every one that is there.

    Reads the files' headers only; of a tied model that stores an output head, the head and the embedding, too. ``key``:
    the user's config key that named the folder, for error messages.
    Raise ValueError: the folder holds no weights or two sets of them, a file (named) is damaged, or a tensor (named)
    is missing, unknown, or of another shape or element type."""
    folder = Path(folder)
    stored = stored_tensors(folder, key)
    least = config.num_layers + config.num_sparse_layers * config.num_experts
    if least > len(stored):  # before the table of all tensors is built, which takes as long as config.json claims
        raise ValueError(
            f"{key}: {folder / 'config.json'} states {config.num_layers} layers (num_hidden_layers) with "
            f"{config.num_experts} experts, of at least {least} tensors; the folder holds {len(stored)}"
        )
    wanted = global_params(config)
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
    if config.family_spec.predictors_field and not config.num_predictors:  # transformers ignores a predictor's tensors
        used |= {name for name in stored if name.startswith(f"model.layers.{config.num_layers}.")}
    used |= {name for name in stored if name.endswith(".rotary_emb.inv_freq")}  # of Llama 2; follows from config.json
    if unknown := sorted(stored.keys() - used):
        more = f" and {len(unknown) - 1} other tensors" if len(unknown) > 1 else ""
        raise ValueError(
            f"{key}: {folder} holds {unknown[0]!r}{more}, which no part of the model that config.json describes uses"
        )


def block_scales(folder: Path, stored: Mapping[str, StoredTensor], key: str = "model.path") -> BlockScales | None:
    """Return how the float8 matrices of a folder are scaled, as its `config.json` says; None: it holds none, or does
    not say.
    Raise ValueError: `config.json` states another quantization."""
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
    Raise ValueError: its shape or its element type, or scales that are missing or do not fit."""
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


def _equal(name: str, other: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether two stored matrices are equal, also in type and shape. Reads `CHUNK_ROWS` at a time."""
    import torch
    from safetensors import safe_open

    left, right = stored[name], stored[other]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with safe_open(left.file, framework="pt") as ours, safe_open(right.file, framework="pt") as theirs:
        rows, other_rows = ours.get_slice(name), theirs.get_slice(other)
        spans = (slice(start, start + CHUNK_ROWS) for start in range(0, left.shape[0], CHUNK_ROWS))
        return all(torch.equal(rows[span], other_rows[span]) for span in spans)
