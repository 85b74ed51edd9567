"""Read the index of a Hugging Face folder, without reading a tensor and without torch."""

from __future__ import annotations

from pathlib import Path

from fusion.model.config import ModelConfig, read_json
from fusion.model.table import global_params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_folder(folder: str | Path, config: ModelConfig, key: str = "model.path") -> None:
    """Check, before any worker starts, that `load_weights` will find every tensor; reads the index only.

    Args:
        key: the user's config key that named the folder, for error messages.

    Raises:
        ValueError: the folder holds no weights, or a tensor (named) is missing.
    """
    files = tensor_files(Path(folder), key)
    for name in global_params(config):
        if name not in files:
            raise ValueError(f"{key}: {folder} lacks the tensor {name!r}")


def tensor_files(folder: Path, key: str = "model.path") -> dict[str, str]:
    """Map every tensor's name to the name of its safetensors file.

    Raises:
        ValueError: ``folder`` holds no safetensors file.
    """
    if (folder / INDEX).is_file():
        return read_json(folder / INDEX, key)["weight_map"]
    if not (folder / SINGLE).is_file():
        raise ValueError(f"{key}: {folder} holds neither {SINGLE} nor {INDEX}")
    from safetensors import safe_open

    with safe_open(folder / SINGLE, framework="np") as file:
        return dict.fromkeys(file.keys(), SINGLE)
