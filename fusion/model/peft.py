"""Begin, read, write and merge adapters, in folders of `peft` (`peft_folder`): its models load what is trained here,
and the reverse.

Adapters begin as peft's do: A uniform within 1 / √I, B zero, so that the model is its base. Each A is drawn by a
generator of its own, seeded by the run's seed and the tensor's name: the same in every layout."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fusion.model.config import ModelConfig
from fusion.model.holder import WeightHolder
from fusion.model.peft_folder import CONFIG, EXPERT, WEIGHTS, adapter_params, described, peft_name, peft_shapes
from fusion.telemetry.files import replace_folder, sync, write_atomic


def begin_adapters(model: WeightHolder, seed: int) -> None:
    """Set a model's adapters to those that a run begins with."""
    _fill(model, _Begun(adapter_params(model.config), seed))


def load_adapter(model: WeightHolder, folder: str | Path) -> None:
    """Load a model's adapters from a folder of `peft`, converted to their dtype. `check_adapter` has accepted it."""
    stored = load_file(Path(folder) / WEIGHTS)
    _fill(model, {name: of_peft(name, stored, model.config) for name in adapter_params(model.config)})


def save_adapter(
    config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], folder: str | Path, base: str
) -> None:
    """Write a folder of `peft` from whole CPU tensors by name; it replaces an existing one atomically. ``base``: path
    of the base model, which the folder names, absolute."""
    assert config.adapters is not None
    folder = Path(folder).resolve()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    described_as = described(config, str(Path(base).resolve()) if base else "")
    save_file(_to_peft(dict(tensors), config), partial / WEIGHTS, metadata={"format": "pt"})
    write_atomic(partial / CONFIG, json.dumps(described_as, indent=2) + "\n")
    shutil.copymode(partial / CONFIG, partial / WEIGHTS)  # the library lets nobody but the owner read it
    for path in partial.iterdir():
        sync(path)
    replace_folder(partial, folder)


def merged(config: ModelConfig, name: str, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a matrix of the base with its adapters added in float32, rounded once to the matrix's dtype; another
    tensor as it is. ``adapters``: all of them, whole, by name."""
    assert config.adapters is not None
    module, rows = name.removesuffix(".weight"), slice(None)
    parent, _, last = module.rpartition(".")
    if (fused := f"{parent}.gate_up_proj.lora_A.weight") in adapters and last in ("gate_proj", "up_proj", "w1", "w3"):
        module = fused.removesuffix(".lora_A.weight")
        rows = slice(0, len(weight)) if last in ("gate_proj", "w1") else slice(len(weight), None)
    if (a := adapters.get(f"{module}.lora_A.weight")) is None:
        return weight
    b = adapters[f"{module}.lora_B.weight"][rows]
    added = b.to(torch.float32) @ a.to(torch.float32) * config.adapters.scale
    return (weight.to(torch.float32) + added).to(weight.dtype)


class _Begun(dict[str, torch.Tensor]):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int):
        super().__init__()
        self._shapes, self._seed = shapes, seed

    def __missing__(self, name: str) -> torch.Tensor:
        """Draw a tensor; the last one is kept, as a rank's parts of it follow each other."""
        self.clear()
        shape = self._shapes[name]
        if ".lora_B." in name:
            return self.setdefault(name, torch.zeros(shape))
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        bound = shape[1] ** -0.5
        return self.setdefault(name, torch.empty(shape).uniform_(-bound, bound, generator=generator))


def _fill(model: WeightHolder, whole: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for param in (param for param in model.table if param.trained):
            view = model.weights.views[param.name]
            for part in param.parts:
                part.view(view).copy_(whole[part.name][tuple(slice(*span) for span in part.region)])


def of_peft(name: str, stored: Mapping[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Return an adapter's tensor, a view of the one that holds it in peft."""
    tensor, match = stored[peft_name(name)], EXPERT.fullmatch(name)
    if match is None:
        return tensor
    experts, expert = config.num_experts, int(match["expert"])
    if match["letter"] == "A":
        return tensor.unflatten(0, (experts, -1))[expert]
    return tensor.unflatten(1, (-1, experts))[:, :, expert]


def _to_peft(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    shapes = peft_shapes(config)
    for name, tensor in tensors.items():
        place = peft_name(name)
        if place not in stored:
            stored[place] = torch.empty(shapes[place], dtype=tensor.dtype)
        if EXPERT.fullmatch(name):
            of_peft(name, stored, config).copy_(tensor)
        else:
            stored[place] = tensor.contiguous()
    return stored
