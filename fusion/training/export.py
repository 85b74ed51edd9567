"""Export a trainer's checkpoint as a Hugging Face folder, on the host alone: no card and no process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fusion.model import ModelConfig, global_params
from fusion.model.huggingface import write_folder
from fusion.model.table import float32_params
from fusion.training.checkpoint import read_trainer
from fusion.training.chunk_files import ChunkFolder, read_chunks
from fusion.training.chunks import Chunk


def export_checkpoint(checkpoint: Path, folder: Path, tokenizer_from: Path | None = None) -> None:
    """Write the weights of a folder of `save_checkpoint`, in the dtype that the run trained in, and in float32 those
    that are kept in it. Holds one shard of the folder in memory at a time.

    Args:
        checkpoint: its files must be whole: they are not verified here.
        tokenizer_from: the folder whose tokenizer and generation settings are copied.

    Raises:
        ValueError: ``checkpoint`` is not a checkpoint.
    """
    saved, chunks = read_trainer(checkpoint), ChunkFolder(checkpoint)
    masked = tuple((start, stop) for start, stop in saved.get("masked_ids", ()))
    config, dtype = replace(ModelConfig.from_hf(saved["model"]), masked_ids=masked), getattr(torch, saved["dtype"])
    in_float32 = float32_params(config)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in global_params(config).items():
            whole = torch.empty(shape, dtype=torch.float32 if name in in_float32 else dtype)
            read_chunks(chunks, [Chunk(f"master/{name}", shape, offset=(0,) * len(shape), tensor=whole)])
            yield name, whole

    write_folder(config, dtype, tensors(), folder, tokenizer_from=tokenizer_from)
