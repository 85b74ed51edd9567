"""Load and save Hugging Face folders in any parallel layout, without assembling the whole model on one rank.

Loading: every rank opens the safetensors files and reads only the boxes of its own parts. Saving: ranks send the parts
that they own (each element has one owner) to rank 0, tensor by tensor; at the same time rank 0 writes shards of
bounded size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from fusion.model.folder import INDEX, SINGLE, tensor_files
from fusion.model.holder import WeightHolder
from fusion.model.table import LocalParam, Part, global_params, local_params

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def load_weights(model: WeightHolder, folder: str | Path) -> None:
    """Load the model's local tensors from a checkpoint folder, converted to their dtype.

    Raises:
        ValueError: a tensor (named) is missing, or its shape differs from what `config.json` implies.
    """
    folder = Path(folder)
    files, shapes = tensor_files(folder), global_params(model.config)
    with ExitStack() as stack, torch.no_grad():
        opened: dict[str, object] = {}
        for param in model.table:
            view = model.weights.views[param.name]
            for part in param.parts:
                file = files.get(part.name)
                if file is None:
                    raise ValueError(f"model.path: {folder} lacks the tensor {part.name!r}")
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                stored = opened[file].get_slice(part.name)  # type: ignore[attr-defined]
                if tuple(stored.get_shape()) != shapes[part.name]:
                    raise ValueError(
                        f"model.path: {folder} holds {part.name!r} with shape {stored.get_shape()}; "
                        f"config.json implies {list(shapes[part.name])}"
                    )
                part.view(view).copy_(stored[tuple(slice(start, stop) for start, stop in part.region)])


def save_folder(
    model: WeightHolder,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = 4 << 30,
    views: Mapping[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write config.json, safetensors shards and, from ``tokenizer_from``, the tokenizer's files.

    Collective over the model's mesh; rank 0 writes. `transformers.AutoModelForCausalLM` loads the folder.

    Args:
        views, group: as of `gather_tensors`.
    """
    folder = Path(folder)
    group = group if group is not None else model.mesh.world_group
    if model.mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(model.weights.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(model.config.to_hf(dtype), indent=2) + "\n")
        if tokenizer_from is not None:
            for name in TOKENIZER_FILES:
                if (Path(tokenizer_from) / name).is_file():
                    shutil.copy(Path(tokenizer_from) / name, folder / name)
    writer = _ShardWriter(folder, shard_bytes) if model.mesh.rank == 0 else None
    for name, tensor in gather_tensors(model, views, group):
        if writer is not None:
            assert tensor is not None
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    if group is not None:
        dist.barrier(group=group)


def gather_tensors(
    model: WeightHolder, views: Mapping[str, torch.Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole CPU tensor) of every global tensor on rank 0, (name, None) on other ranks. Collective.

    Args:
        views: tensors to gather instead of the model's own, for example a copy: this rank's parameters by local name.
        group: process group over the ranks of the mesh, in their order, not in use elsewhere during the call. None: the
            mesh's own.
    """
    mesh = model.mesh
    views = model.weights.views if views is None else views
    group = group if group is not None else mesh.world_group
    tables = [
        local_params(model.config, mesh.parallel, rank, max_numel=model.max_numel)
        for rank in range(mesh.parallel.world)
    ]
    for name, holders in _owners(tables).items():
        whole = None
        if mesh.rank == 0:
            shape = [max(part.region[d][1] for _, _, part in holders) for d in range(len(holders[0][2].region))]
            whole = torch.empty(shape, dtype=model.weights.dtype)
        for rank, param, part in holders:
            if rank == mesh.rank:
                piece = part.view(views[param.name]).cpu().contiguous()
                if whole is None:
                    dist.send(piece, group_dst=0, group=group)
                else:
                    whole[tuple(slice(*span) for span in part.region)] = piece
            elif whole is not None:
                piece = torch.empty(part.shape, dtype=whole.dtype)
                dist.recv(piece, group_src=rank, group=group)
                whole[tuple(slice(*span) for span in part.region)] = piece
        yield name, whole


def _owners(tables: list[tuple[LocalParam, ...]]) -> dict[str, list[tuple[int, LocalParam, Part]]]:
    """Map each global tensor to the parts that make it up, each from the lowest rank that holds it."""
    owners: dict[str, dict[tuple, tuple[int, LocalParam, Part]]] = {}
    for rank, table in enumerate(tables):
        for param in table:
            for part in param.parts:
                owners.setdefault(part.name, {}).setdefault(part.region, (rank, param, part))
    return {name: list(parts.values()) for name, parts in owners.items()}


class _ShardWriter:
    """Collects tensors and writes them in shards of at most ``shard_bytes``, then the index."""

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
        save_file(self.pending, self.folder / f"shard-{len(self.shards)}.safetensors", metadata={"format": "pt"})
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
        (self.folder / INDEX).unlink(missing_ok=True)
        if count > 1:
            index_json = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index_json, indent=2) + "\n")
