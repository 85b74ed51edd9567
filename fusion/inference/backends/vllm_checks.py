"""Check when vLLM starts that its tensors are those of the table, and that it computes from them.

    keyed values ─► vLLM's own loader ─► its tensors ─► compared, part by part, with the table      (`KeyedWeights`)
    a dummy batch ─► every module that has weights: other weights, at another place, change its output (`check_live`)
    latent attention ─► what vLLM derives from weights equals what is kept up to date             (`check_absorbed`)

The first finds a table that is wrong although all shapes agree: two experts, or the halves of a fused matrix,
exchanged. The second finds a *stale handle*: a packed or remembered copy of a weight that vLLM computes from, so that
weights written later would have no effect. They cost one layer's weights of each kind, and one batch, whatever the
model's size."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.backends.vllm_latents import ABSORBED, absorbed, latent_layers
from fusion.inference.backends.vllm_routing import sparse_layers
from fusion.model import ModelConfig, global_params
from fusion.model.boxes import Box
from fusion.model.local_param import LocalParam
from fusion.model.table import float32_params

MODULUS = 251
"""Keyed values are multiples of 1/64 below 2: exact in every dtype of weights"""

DUMMY_TOKENS, DUMMY_BLOCKS = 16, 16
COMPUTED = frozenset({"cos_sin_cache", "inv_freq"})
"""Buffers that vLLM computes from the config"""


class WeightsNotOurs(ValueError):
    """vLLM's tensors are not those of the table, or not those that it computes from. ``tensor``: its name in vLLM."""

    def __init__(self, tensor: str, problem: str):
        super().__init__(f"rollout.backend=vllm: {tensor}: {problem}; use rollout.backend=embedded")
        self.tensor = tensor


class KeyedWeights:
    """Values of every element of the global tensors, from its name and index alone."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self.config, self.dtype, self._float32 = config, dtype, float32_params(config)
        kinds = [(config.layer(index).attention, config.layer(index).mlp) for index in range(config.num_layers)]
        self.layers = frozenset(index for index, kind in enumerate(kinds) if kind not in kinds[:index])
        """The first layer of each kind"""

    def values(self, name: str, region: Box) -> torch.Tensor:
        """Return the elements ``region`` of a global tensor, on the CPU."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        total = torch.full([1] * len(region), int.from_bytes(digest[:2], "big") % MODULUS, dtype=torch.int16)
        for d, (start, stop) in enumerate(region):
            step = 1 + int.from_bytes(digest[2 * d + 2 : 2 * d + 4], "big") % (MODULUS - 1)
            along = (torch.arange(start, stop) * step % MODULUS).to(torch.int16)
            total = total + along.view([-1 if e == d else 1 for e in range(len(region))])
        dtype = torch.float32 if name in self._float32 else self.dtype
        return ((total % MODULUS - MODULUS // 2).to(torch.float32) / 64).to(dtype)

    def load(self, module: torch.nn.Module) -> None:
        """Load the values of these layers and of the tensors outside of layers, by vLLM's own loader."""
        loaded: Any = module
        loaded.load_weights(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in global_params(self.config).items():
            words = name.split(".")
            if words[1] != "layers" or int(words[2]) in self.layers:
                yield name, self.values(name, tuple((0, size) for size in shape))

    def check(self, table: Iterable[LocalParam], module: torch.nn.Module) -> None:
        """Compare what vLLM's loader has put where with a table.
        Raise WeightsNotOurs: an element lies elsewhere than in the table (names both sides)."""
        for param in table:
            if param.layer is not None and param.layer not in self.layers:
                continue
            local = module.get_parameter(param.name).detach()
            for part in param.parts:
                if not torch.equal(part.view(local).cpu(), self.values(part.name, part.region)):
                    box = ", ".join(f"{start}:{stop}" for start, stop in part.local)
                    raise WeightsNotOurs(
                        param.name,
                        f"the table places {part.name} {list(part.region)} at [{box}], vLLM's loader does not",
                    )


def check_tensors(table: Iterable[LocalParam], module: torch.nn.Module, dtype: torch.dtype, rank: int) -> None:
    """Compare names, shapes and dtypes of vLLM's parameters on this rank with a table.
    Raise WeightsNotOurs: they differ (names the tensor and both sides), or a buffer may hold weights."""
    expected = {param.name: (param.shape, torch.float32 if param.float32 else dtype) for param in table}
    actual = {name: (tuple(param.shape), param.dtype) for name, param in module.named_parameters()}
    actual = {name: value for name, value in actual.items() if name.rsplit(".", 1)[-1] not in ABSORBED}
    for name in [*expected, *actual]:
        ours, theirs = expected.get(name, "no such tensor"), actual.get(name, "no such tensor")
        if ours != theirs:
            raise WeightsNotOurs(name, f"on rank {rank} the table has {ours}, vLLM {theirs}")
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.numel() > 1 and name.rsplit(".", 1)[-1] not in COMPUTED:
            raise WeightsNotOurs(name, f"vLLM has a buffer {tuple(buffer.shape)} that may hold weights")


def check_experts(table: Iterable[LocalParam], module: torch.nn.Module) -> None:
    """Compare which expert vLLM expects in which place of every stack with a table.
    Raise WeightsNotOurs: they differ."""
    for param in table:
        if not (param.expert and param.expert_index is None):
            continue
        layer = module.get_submodule(param.name.rsplit(".", 1)[0])
        slots = {int(part.name.rsplit(".", 3)[1]): part.local[0][0] for part in param.parts}
        owned: Any = layer.expert_map
        if owned is None:
            theirs = {expert: expert for expert in range(param.shape[0])}
        else:
            theirs = {expert: slot for expert, slot in enumerate(owned.tolist()) if slot >= 0}
        if theirs != slots:
            raise WeightsNotOurs(param.name, f"the table has the experts {slots} (expert: place), vLLM {theirs}")


def check_absorbed(module: torch.nn.Module) -> None:
    """Compare what vLLM's layers of latent attention have derived from weights with what is kept up to date.
    Raise WeightsNotOurs: a tensor has other values than expected, or may be derived from other weights."""
    for path, layer in latent_layers(module).items():
        expected = absorbed(layer)
        for name, value in [*layer.named_parameters(recurse=False), *vars(layer.impl).items()]:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                if name not in expected or not torch.equal(value.data, expected[name]):
                    raise WeightsNotOurs(f"{path}.{name}", f"vLLM derives {tuple(value.shape)} otherwise from weights")


def check_live(core: VllmCore, table: Iterable[LocalParam]) -> None:
    """Check that vLLM computes from the tensors of a table. Collective over the engine's ranks.
    Raise WeightsNotOurs: other values of a weight, at another place in memory, do not change what its module computes.
    """
    module, owners = core.module, dict[torch.nn.Module, dict[str, torch.nn.Parameter]]()
    stale: list[str] = []
    for param in table:
        path, _, _ = param.name.rpartition(".")
        owner = module.get_submodule(path)
        if param.expert:  # with the exchange of tokens between ranks
            owner = module.get_submodule(path.rpartition(".")[0])
        if param.storage == "unit":
            owners.setdefault(owner, {})[param.name] = module.get_parameter(param.name)
    seen: set[torch.nn.Module] = set()
    with ExitStack() as hooks, torch.no_grad():
        for owner, params in owners.items():
            hooks.enter_context(patch.object(owner, "forward", _Probe(owner, params, seen, stale, owner.forward)))
        core.allocate_kv(DUMMY_BLOCKS)
        core.dummy_pass(DUMMY_TOKENS)
        core.release_kv()
    head = getattr(module, "lm_head", None)
    apart = dict.fromkeys([head] if head is not None else [])  # computed from after a batch
    if latent_layers(module):  # computed from with requests only
        paths = [path for path, child in module.named_modules() if hasattr(child, "kv_b_proj")]
        inside = {child for path in paths for child in module.get_submodule(path).modules()}
        apart |= dict.fromkeys(owner for owner in owners if owner in inside and owner not in seen)
    for owner in apart:
        named = {name: param for name, param in module.named_parameters() if param is owner.weight}
        with torch.no_grad():
            _Probe(owner, named, set(), stale, _alone(owner))()
        seen.add(owner)
    for owner, params in owners.items():
        if owner not in seen:
            raise WeightsNotOurs(next(iter(params)), "vLLM computes without the module that has it")
    if stale:
        raise WeightsNotOurs(
            stale[0], f"vLLM computes from a copy of it: other values change nothing (also: {stale[1:4]})"
        )


def check_recorded(core: VllmCore, config: ModelConfig) -> None:
    """Check that vLLM records the experts of every token, instead of zeros. Collective over the engine's ranks.
    Raise ValueError: it does not, in a layer that has experts."""
    experts, layers = core.runner.routed_experts_capturer.device_buffer, sparse_layers(config)
    experts.fill_(-1)
    core.allocate_kv(DUMMY_BLOCKS)
    core.dummy_pass(DUMMY_TOKENS)
    core.release_kv()
    missing = [layer for layer in layers if (experts[:DUMMY_TOKENS, layer] < 0).any()]
    if missing:
        raise ValueError(
            f"algorithm.replay=rollout: vLLM does not record the experts of the layers {missing} on this card; use"
            " rollout.backend=embedded"
        )


@dataclass
class _Probe:
    """Stand in for the forward pass of a module: replace its weights one by one and compare the outputs."""

    owner: Any
    params: dict[str, torch.nn.Parameter]
    seen: set[torch.nn.Module]
    stale: list[str]
    call: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.owner not in self.seen:
            self.seen.add(self.owner)
            self._probe(args, kwargs)
        return self.call(*args, **kwargs)

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = self._output(args, kwargs)
        for name, param in self.params.items():
            weight = param.data
            value = (torch.arange(weight.numel(), device=weight.device) % 11 - 3) / 16
            param.data = value.to(weight.dtype).view(weight.shape)
            if torch.equal(before, self._output(args, kwargs)):
                self.stale.append(name)
            param.data = weight

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return what the module computes from values that no layer before it has changed."""
        result = self.call(*map(_filled, args), **{name: _filled(value) for name, value in kwargs.items()})
        return (result[0] if isinstance(result, tuple) else result).clone()


def _alone(owner: Any) -> Callable[[], torch.Tensor]:
    """Return what computes a linear map or a norm of two rows, without its exchange between ranks."""
    weight = owner.weight
    rows = _filled(torch.empty(2, weight.shape[-1], dtype=weight.dtype, device=weight.device))
    if hasattr(owner, "quant_method"):
        return lambda: owner.quant_method.apply(owner, rows, None)
    return lambda: owner.forward(rows)


def _filled(value: Any) -> Any:
    """Return values of which none is 0, in place of a tensor of activations; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return ((torch.arange(value.numel(), device=value.device) % 7 + 1) / 8).to(value.dtype).view(value.shape)
