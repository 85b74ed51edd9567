"""Models of benchmarks with random weights, their engines, and the cards that they run on."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import Arguments
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer
from fusion.npu.operators import operators_of
from tests.helpers import end_ranks, run_ranks, tiny_config
from tests.rollouts import rollout_config


class PlainCpu:
    """Stands in for a device: the plain CPU, with no emulated card."""

    torch_device, operators = torch.device("cpu"), operators_of("ledger")

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self._memory = SimpleNamespace(free=free_bytes)

    def owner(self, name: str) -> Any:
        return nullcontext()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def memory(self) -> Any:
        return self._memory

    def synchronize(self) -> None:
        pass


def on_cards(part: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Run a part on emulated cards, each in a fresh process of one thread; return its results by rank."""
    results = run_ranks(part, world, *args, timeout_s=3600)
    end_ranks()
    return results


def moe_of(args: Arguments) -> ModelConfig:
    """Return a Qwen3-MoE of ``args.layers`` layers with ``args.hidden`` channels: 89M parameters of 8 with 512."""
    width = args.hidden
    sizes = dict(vocab_size=32 * width, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=args.layers)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8)
    sizes |= dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=21 * width // 32)
    return tiny_config(**sizes, tie_word_embeddings=False)


def randomise(model: Transformer, std: float = 0.02) -> Transformer:
    """Give every weight a value of its usual size, norms 1: the time of what is all zeros tells nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(random if parameter.dim() > 1 else torch.ones(()))
    return model


def model_of(config: ModelConfig, device: Any, std: float = 0.02, **how: Any) -> Transformer:
    """Build a model with random weights on one rank. ``how``: as `Transformer`."""
    return randomise(Transformer(config, Mesh.single(), device, **how), std)


def requests_of(prompts: Iterable[Iterable[int]], params: SamplingParams, name: object = "") -> list[Request]:
    """Return a request of each prompt. ``name``: what distinguishes them from those of other rounds."""
    return [Request(f"{name}-{number}", tuple(prompt), params) for number, prompt in enumerate(prompts)]


def engine_of(
    model: Transformer, drafter: Any = None, *, memory: Any = None, kv_store: Any = None, **config: Any
) -> EmbeddedEngine:
    """Create the model's engine, with its KV cache. ``config``: last parts of keys of `rollout`."""
    own: Any = dict(drafter=drafter, memory=memory, kv_store=kv_store)
    engine = EmbeddedEngine(model, model.mesh, model.device, rollout_config(**config), **own)
    engine.allocate_kv()
    return engine
