"""Describe folders of `peft`, and check one from its headers. Pure: no torch.

adapter_config.json           rank, alpha, the matrices that have adapters
adapter_model.safetensors     base_model.model.NAME.lora_A.weight [r, I] and .lora_B.weight [O, r] of a matrix NAME;
                              of a layer's experts, which are two stacks in transformers, A [E r, I] of all of
                              them, and B [O, r E], whose columns count experts fastest
"""

import re
from pathlib import Path
from typing import Any

from fusion.model.config import ModelConfig
from fusion.model.stored import read_header, read_json
from fusion.model.table import global_params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "model.adapter"
PREFIX = "base_model.model."
EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base, too
}
"""Fields of an `adapter_config.json` that are not empty, with what they may state"""
IGNORED = frozenset(
    "r lora_alpha lora_dropout target_modules target_parameters exclude_modules layers_to_transform layers_pattern "
    "task_type inference_mode base_model_name_or_path revision auto_mapping peft_version megatron_core "
    "qalora_group_size".split()
)
"""Fields that are compared otherwise, as the file's tensors are, or that change nothing. Any other one, of whatever
version of peft, is empty unless it computes otherwise."""
DTYPES = ("F32", "BF16", "F16")
"""Types of the tensors, as safetensors names them"""
EXPERT = re.compile(
    r"(?P<layer>model\.layers\.\d+)\..+\.experts\.(?P<expert>\d+)\.(?P<matrix>.+)\.lora_(?P<letter>[AB])\.weight"
)
_EXPERTS = {"gate_up_proj": "mlp.experts.base_layer", "down_proj": "mlp.experts", "w2": "mlp.experts"}
"""Modules of the stacks in transformers, as peft wraps one adapted parameter of a module in the other"""


def adapter_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the name of every adapter's tensor to its shape."""
    return {name: shape for name, shape in global_params(config).items() if ".lora_" in name}


def check_adapter(folder: str | Path, config: ModelConfig) -> None:
    """Check that a folder of `peft` holds the adapters of a model, no fewer and no more.
    Raise ValueError: it does not, by `model.adapter`; names the field, tensor or key."""
    folder, adapters = Path(folder), config.adapters
    if adapters is None:
        raise ValueError(f"{KEY}={folder}: expected training.lora.rank to be the adapter's")
    stated = read_json(folder / CONFIG, KEY)
    for name in sorted(stated.keys() - IGNORED):
        accepted = EXPECTED.get(name, (None, False, [], {}))
        if stated[name] not in accepted:
            raise ValueError(f"{KEY}: {folder / CONFIG}: {name}={stated[name]!r}; expected {accepted[0]!r}")
    for name, key, own in (("r", "rank", adapters.rank), ("lora_alpha", "alpha", adapters.alpha)):
        if stated.get(name) != own:
            raise ValueError(f"{KEY}: {folder / CONFIG}: {name}={stated.get(name)!r}; training.lora.{key} is {own:g}")
    expected = {name: tuple(shape) for name, shape in peft_shapes(config).items()}
    header = read_header(folder / WEIGHTS, KEY)
    for name in sorted(expected.keys() ^ header.keys()):
        lacks = "lacks" if name in expected else "also holds"
        raise ValueError(f"{KEY}: {folder / WEIGHTS} {lacks} {name!r} (training.lora.targets={[*adapters.targets]})")
    for name, shape in expected.items():
        if (tensor := header[name]).shape != shape or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{KEY}: {folder / WEIGHTS} holds {name!r} as {tensor.dtype} {[*tensor.shape]}; expected {[*shape]} of "
                f"{', '.join(DTYPES)}"
            )


def peft_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the name of every tensor of a folder with a model's adapters to its shape."""
    shapes = dict[str, tuple[int, ...]]()
    for name, (rows, columns) in adapter_params(config).items():
        if match := EXPERT.fullmatch(name):
            experts = config.num_experts
            rows, columns = (rows * experts, columns) if match["letter"] == "A" else (rows, columns * experts)
        shapes[peft_name(name)] = (rows, columns)
    return shapes


def peft_name(name: str) -> str:
    """Return the name of the tensor of peft that holds a tensor."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return PREFIX + name
    return f"{PREFIX}{match['layer']}.{_EXPERTS[match['matrix']]}.lora_{match['letter']}.weight"


def described(config: ModelConfig, base: str) -> dict[str, Any]:
    """Return the `adapter_config.json` of a model's adapters; ``base``: path of the base model."""
    adapters = config.adapters
    assert adapters is not None
    names = sorted({peft_name(name).removeprefix(PREFIX).rpartition(".lora_")[0] for name in adapter_params(config)})
    by_module = [name for name in names if ".self_attn." in name or not config.num_experts]
    # Of a model with experts peft takes these names in `target_modules` for those of the experts' stacks.
    others = {re.sub(r".*\.\d+\.", "", name) for name in names if name not in by_module and ".experts" not in name}
    stacks = {f"mlp.experts.{stack}_proj" for stack in ("gate_up", "down") if any(".experts" in name for name in names)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in by_module}),
        "target_parameters": sorted({*(f"{name}.weight" for name in others), *stacks}),
        "inference_mode": True,
    }
