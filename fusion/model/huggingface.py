"""Load and save Hugging Face folders in any parallel layout, without assembling the whole model on one rank.

Loading: every rank opens the safetensors files and reads only the boxes of its own parts. Saving: ranks send the parts
that they own (each element has one owner) to rank 0 in the order of the tensors, small ones several in a message; at
the same time rank 0 writes shards of bounded size."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fusion.model.box_checksum import MODULUS, box_checksum
from fusion.model.boxes import Box
from fusion.model.config import GENERATION, ModelConfig
from fusion.model.folder import FLOAT8, block_scales, check_tensor
from fusion.model.gathering import gather_tensors, owners_of
from fusion.model.hf_quantization import BlockScales, scale_of
from fusion.model.holder import WeightHolder
from fusion.model.peft import save_adapter
from fusion.model.stored import INDEX, SINGLE, StoredTensor, read_json, stored_tensors
from fusion.model.table import global_params
from fusion.model.tokenizer_files import tokenizer_files
from fusion.telemetry.files import replace_folder, sync, write_atomic

SUPPRESSED = "suppress_tokens"
"""Ids that transformers' `generate` never samples"""

WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*", "tf_model*.h5*", "flax_model*.msgpack*")
"""Names of the files that transformers loads weights from"""

WHOLE_BYTES = 1 << 30
"""Files of at most this size are digested whole before the cards start: what was loaded of them needs no checksum"""


def load_weights(model: WeightHolder, folder: str | Path, whole_bytes: int = WHOLE_BYTES) -> dict[str, int]:
    """Load the model's local tensors from a checkpoint folder, all but adapters, converted to their dtype; float8
    matrices are dequantized box by box.

    Return the checksums (`box_checksum`) of what this rank owns of each file of more than ``whole_bytes``, by name:
    over all ranks they add up, mod MODULUS, to the checksum of the file, in any layout.
    Raise ValueError: a tensor (named) is missing, or its shape or element type differs from what `config.json`
    implies."""
    folder = Path(folder)
    stored, shapes = stored_tensors(folder), global_params(model.config)
    large = {file for file in {tensor.file for tensor in stored.values()} if file.stat().st_size > whole_bytes}
    owners, sums = owners_of(model) if large else {}, dict.fromkeys((file.name for file in large), 0)
    scales = block_scales(folder, stored)
    with ExitStack() as stack, torch.no_grad():
        reader = BoxReader(stored, scales, stack)
        for param in model.table:
            view = model.weights.views[param.name]
            if model.config.adapters and param.trained:
                continue
            for part in param.parts:
                if part.name not in stored:
                    raise ValueError(f"model.path: {folder} lacks the tensor {part.name!r}")
                check_tensor(stored, part.name, shapes[part.name], scales)
                values = reader.read(part.name, part.region)
                part.view(view).copy_(values)
                file = stored[part.name].file
                if file in large and (model.mesh.rank, param, part) in owners[part.name]:
                    sums[file.name] += box_checksum(values, part.name, part.region)
    return {name: value % MODULUS for name, value in sums.items()}


class BoxReader:
    """Read boxes of stored tensors, and nothing around them. ``stack`` closes the files."""

    def __init__(self, stored: Mapping[str, StoredTensor], scales: BlockScales | None, stack: ExitStack):
        self._stored, self._scales, self._stack = stored, scales, stack
        self._files: dict[Path, Any] = {}

    def read(self, name: str, region: Box) -> torch.Tensor:
        """Return the box ``region`` of the tensor ``name`` as it is stored, or in float32 if it is quantized."""
        values = self._slice(name, region)
        if self._stored[name].dtype != FLOAT8:
            return values
        assert self._scales is not None
        scales = self._slice(scale_of(name), self._scales.scales(region))
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            file = self._stored[scale_of(name)].file
            raise ValueError(f"model.path: {file} holds {scale_of(name)!r} with a scale that is negative or not finite")
        return dequantize(values, scales, region, self._scales)

    def _slice(self, name: str, region: Box) -> torch.Tensor:
        file = self._stored[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._files[file].get_slice(name)[tuple(slice(start, stop) for start, stop in region)]


def dequantize(values: torch.Tensor, scales: torch.Tensor, region: Box, blocks: BlockScales) -> torch.Tensor:
    """Return the box ``region`` of a float8 matrix in float32: each element times the scale of its block, one rounding.
    ``values``: float8 [rows, columns] of the box. ``scales``: float32, of the blocks that the box touches
    (`BlockScales.scales`)."""
    (top, bottom), (left, right) = region
    matrix = values.to(torch.float32)
    by_column = torch.arange(left, right) // blocks.columns - left // blocks.columns
    for scales_C, start in zip(scales[:, by_column], range(top - top % blocks.rows, bottom, blocks.rows), strict=True):
        matrix[max(start - top, 0) : start - top + blocks.rows].mul_(scales_C)
    return matrix


def save_folder(
    model: WeightHolder,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = 4 << 30,
    views: Mapping[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write config.json, generation_config.json, safetensors shards and the tokenizer's files of ``tokenizer_from``; of
    a model with adapters a folder of `peft` (`fusion.model.peft`).

    Collective over the model's mesh; rank 0 writes. `transformers.AutoModelForCausalLM` loads the folder. An existing
    folder is replaced atomically, as a whole; its files that describe no weights are kept. ``views``, ``group``: as of
    `gather_tensors`."""
    group = group if group is not None else model.mesh.world_group
    tensors = gather_tensors(model, views, group)
    if model.mesh.rank == 0:
        whole = ((name, tensor) for name, tensor in tensors if tensor is not None)
        if model.config.adapters:
            save_adapter(model.config, whole, folder, base=str(tokenizer_from or ""))
        else:
            write_folder(
                model.config, model.weights.dtype, whole, folder, tokenizer_from=tokenizer_from, shard_bytes=shard_bytes
            )
    else:
        for _ in tensors:
            pass
    if group is not None:
        dist.barrier(group=group)


def write_folder(
    config: ModelConfig,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write the folder of `save_folder` from whole CPU tensors, of which a shard is held at a time. ``dtype``: of those
    that are not kept in float32."""
    folder = Path(folder).resolve()  # a link to a folder stays one
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_descriptions(config, dtype, partial, Path(tokenizer_from) if tokenizer_from is not None else None)
    writer = _ShardWriter(partial, shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()
    for path in partial.glob("*.safetensors"):
        shutil.copymode(partial / "config.json", path)  # the library lets nobody but the owner read it
    for path in partial.rglob("*"):
        sync(path)
    _keep_other_files(folder, partial)
    replace_folder(partial, folder)


def _write_descriptions(config: ModelConfig, dtype: torch.dtype, folder: Path, tokenizer_from: Path | None) -> None:
    """Write what is not weights. The end tokens are stated twice, as transformers' `generate` reads the second file,
    which also states the ids that were masked."""
    generation = dict[str, Any]()
    if tokenizer_from is not None:
        for path in tokenizer_files(tokenizer_from):
            (folder / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(tokenizer_from / path, folder / path)
        if (tokenizer_from / GENERATION).is_file():
            generation = read_json(tokenizer_from / GENERATION)
    hf = config.to_hf(str(dtype).removeprefix("torch."))
    generation |= {name: hf[name] for name in ("eos_token_id", "pad_token_id") if hf[name] is not None}
    if config.masked_ids:
        stated = generation.get(SUPPRESSED)
        suppressed = [id for id in stated if isinstance(id, int)] if isinstance(stated, list) else []
        generation[SUPPRESSED] = sorted({*suppressed, *config.every_masked_id})
    for name, content in (("config.json", hf), (GENERATION, generation)):
        write_atomic(folder / name, json.dumps(content, indent=2) + "\n")


def _keep_other_files(old: Path, new: Path) -> None:
    """Link what an earlier export or a user left in a folder, except weights, which must not lie beside others."""
    for path in old.iterdir() if old.is_dir() else ():
        if any(fnmatch(path.name, pattern) for pattern in WEIGHTS) or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(path, new / path.name)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(source, target, follow_symlinks=False)


class _ShardWriter:
    """Collect tensors and write them in shards of at most ``shard_bytes``, then the index."""

    def __init__(self, folder: Path, shard_bytes: int):
        self.folder, self.shard_bytes = folder, shard_bytes
        self.pending: dict[str, torch.Tensor] = {}
        self.shards: list[list[str]] = []
        self.bytes = self.total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.pending and self.bytes + tensor.nbytes > self.shard_bytes:
            self._flush()
        self.pending[name] = tensor
        self.bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"shard-{len(self.shards)}.safetensors"
        try:
            save_file(self.pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # it names neither
            raise OSError(f"{path}: {self.bytes:,} bytes could not be written: {error}") from error
        self.shards.append(list(self.pending))
        self.pending, self.bytes = {}, 0

    def close(self) -> None:
        self._flush()
        count = len(self.shards)
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self.shards):
            final = SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{index}.safetensors").rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index_json = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            write_atomic(self.folder / INDEX, json.dumps(index_json, indent=2) + "\n")
