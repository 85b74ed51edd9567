"""Export a trainer's checkpoint as a Hugging Face folder, on the host alone: no card and no process group."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusion.model import ModelConfig, global_params
from fusion.model.folder import block_scales
from fusion.model.huggingface import BoxReader, write_folder
from fusion.model.peft import merged, save_adapter
from fusion.model.peft_folder import adapter_params
from fusion.model.stored import stored_tensors
from fusion.model.table import float32_params
from fusion.training.checkpoint import adapters_in, read_trainer
from fusion.training.chunk_files import Chunk, ChunkFolder, read_chunks


def export_checkpoint(
    checkpoint: Path, folder: Path, tokenizer_from: Path | None = None, base: Path | None = None, merge: bool = False
) -> None:
    """Write the weights of a folder of `save_checkpoint`, in the dtype that the run trained in, and in float32 those
    that are kept in it. Holds one shard of the folder in memory at a time. Of adapters a folder of `peft`, or with
    ``merge`` the whole model: the adapters are added to the base in float32, and the sum is rounded once.
    ``checkpoint``: its files must be whole: they are not verified here.
    ``tokenizer_from``: the folder whose tokenizer and generation settings are copied.
    ``base``: the model that adapters were trained beside.
    Raise ValueError: ``checkpoint`` is not a checkpoint, or there is nothing to merge, or no base to merge it with."""
    saved, chunks = read_trainer(checkpoint), ChunkFolder(checkpoint)
    masked = tuple((start, stop) for start, stop in saved.get("masked_ids", ()))
    config, dtype = ModelConfig.from_hf(saved["model"]), getattr(torch, saved["dtype"])
    config = replace(config, masked_ids=masked, adapters=adapters_in(saved))
    in_float32 = float32_params(config)

    def tensors(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=torch.float32 if name in in_float32 or merge else dtype)
            read_chunks(chunks, [Chunk(f"master/{name}", shape, offset=(0,) * len(shape), tensor=whole)])
            yield name, whole

    if merge and config.adapters is None:
        raise ValueError(f"{checkpoint}: expected adapters to merge; all weights are trained")
    if merge and base is None:
        raise ValueError(f"{checkpoint}: the config.yaml that names the base is missing from its run")
    options: dict[str, Any] = {"tokenizer_from": tokenizer_from}
    if config.adapters is None:
        write_folder(config, dtype, tensors(global_params(config)), folder, **options)
    elif not merge:
        save_adapter(config, tensors(adapter_params(config)), folder, base=str(base or ""))
    else:
        assert base is not None
        with ExitStack() as stack:
            adapters = dict(tensors(adapter_params(config)))
            whole = (
                (name, merged(config, name, tensor, adapters).to(torch.float32 if name in in_float32 else dtype))
                for name, tensor in _stored(config.base, base, stack)
            )
            write_folder(config.base, dtype, whole, folder, **options)


def _stored(config: ModelConfig, folder: Path, stack: ExitStack) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors of a Hugging Face folder, in float32."""
    stored = stored_tensors(folder)
    reader = BoxReader(stored, block_scales(folder, stored), stack)
    for name, shape in global_params(config).items():
        yield name, reader.read(name, tuple((0, size) for size in shape)).to(torch.float32)
