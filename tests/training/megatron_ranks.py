"""What the tests of the Megatron backend run on every rank: the same steps by both models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusion.model import Buckets, Mesh, ModelConfig, Parallel, Transformer, global_params
from fusion.model.holder import WeightHolder
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, TrainingConfig, load_checkpoint, save_checkpoint
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.backends.megatron_model import MegatronModel
from tests.training.ranks import LONGEST, my_share, sample_batch
from tests.training.test_checkpoint import state_of

MODELS = {"embedded": Transformer, "megatron": MegatronModel}


class Case(NamedTuple):
    """A run of a few steps. ``replay``: the routing of the embedded model's pass is replayed."""

    config: ModelConfig
    layout: Parallel = Parallel()
    training: dict[str, Any] = {}
    dtype: str = "float32"
    samples: int = 12
    steps: int = 2
    bucket_bytes: int = 1 << 16
    replay: bool = False


def whole_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random global tensors, the same on every rank."""
    random = torch.Generator().manual_seed(5)
    return {
        name: torch.ones(shape) + 0.1 * torch.randn(shape, generator=random)
        if len(shape) == 1
        else 0.2 * torch.randn(shape, generator=random)
        for name, shape in global_params(config).items()
    }


def fill(model: WeightHolder, whole: dict[str, torch.Tensor]) -> None:
    for param in model.table:
        for part in param.parts:
            values = whole[part.name][tuple(slice(*span) for span in part.region)]
            part.view(model.weights.views[param.name]).copy_(values)


def make_engine(name: str, case: Case, device: Any, mesh: Mesh) -> EmbeddedTrainEngine:
    model = MODELS[name](case.config, mesh, device, getattr(torch, case.dtype), bucket_bytes=case.bucket_bytes)
    fill(model, whole_weights(case.config))
    defaults = {"lr": 1e-3, "token_budget": 30, "load_balancing_coef": case.config.router_aux_coef}
    training = TrainingConfig(**(defaults | case.training))
    training.validate()
    return EmbeddedTrainEngine(model, mesh, device, training)


def both(rank: int, device: Any, case: Case) -> dict[str, Any]:
    """Log-probabilities before the first step and the metrics of every step, by model."""
    mesh = Mesh.create(case.layout)
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST)
    results: dict[str, Any] = {}
    batches = []
    for name in MODELS:
        engine = make_engine(name, case, device, mesh)
        steps, before = [], engine.model.weights.card.cpu().clone()
        for step in range(case.steps):
            if len(batches) == step:  # the embedded model's, so that both train on equal data
                batch = my_share(sample_batch(case.samples, 3 + step), engine)
                batches.append(engine.with_own_routing(batch) if case.replay else batch)
            logprobs, entropy = engine.logprobs(batches[step])
            metrics = engine.forward_backward(algorithm.weigh(batches[step]), algorithm.loss)
            steps.append({"logprobs": logprobs, "entropy": entropy, **metrics, **engine.optimizer_step()})
        routing = None
        if case.config.num_experts:
            routing = engine.with_own_routing(replace(batches[0], routing=None)).routing
        corrections = engine.model.weights.card.cpu()
        results[name] = {"steps": steps, "routing": routing, "corrections": [before, corrections]}
        held = memory_of(engine.model.weights)
        engine.model.weights.release()
        assert memory_of(engine.model.weights) == 0 < held
        if name == "megatron":
            trained = [param for _, param in engine.model.named_parameters() if param.requires_grad]
            assert trained and sum(param.untyped_storage().nbytes() for param in trained) == 0
    return results


def save(rank: int, device: Any, name: str, case: Case, folder: str) -> tuple[Any, dict[str, float]]:
    """The state that a trainer saves after a step, and the metrics of its next one."""
    engine = make_engine(name, case, device, Mesh.create(case.layout))
    step_of(engine, 1)
    save_checkpoint(engine, folder)
    return state_of(engine), step_of(engine, 2)


def load(rank: int, device: Any, name: str, case: Case, folder: str) -> tuple[Any, dict[str, float]]:
    """The state that a trainer loads over other values, and the metrics of its next step."""
    engine = make_engine(name, case, device, Mesh.create(case.layout))
    for view in engine.model.weights.views.values():
        view.fill_(-3.0)
    load_checkpoint(engine, folder)
    return state_of(engine), step_of(engine, 2)


def step_of(engine: EmbeddedTrainEngine, seed: int) -> dict[str, float]:
    metrics = engine.forward_backward(my_share(sample_batch(8, seed), engine), cross_entropy)
    return metrics | engine.optimizer_step()


def memory_of(weights: Buckets) -> int:
    return sum(weights.held(index) for index in range(len(weights.flats)))
