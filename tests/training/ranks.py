"""What the tests of the trainer run on every rank, and the batches they train on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.model.gathering import gather_tensors
from fusion.model.peft import begin_adapters, load_adapter
from fusion.offload import StreamedStates
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, Sequences, TrainingConfig, split_over_ranks
from fusion.training.algorithms import make_algorithm
from fusion.training.config import LoraConfig
from fusion.training.states import ResidentStates
from tests.training.sequences import sequences_of

LONGEST = 16
"""Response tokens; more than any of `sample_batch` has."""


class Case(NamedTuple):
    """One training run of a few steps; everything the ranks need."""

    checkpoint: str
    layout: Parallel = Parallel()
    training: dict[str, Any] = {}
    algorithm: dict[str, Any] = {}
    dtype: str = "float32"
    bucket_bytes: int = 64 << 20
    steps: int = 1
    accumulate: int = 1
    streamed: bool = False  # the optimizer's states live on the host
    samples: int = 12
    seed: int = 3
    lora: dict[str, Any] = {}
    adapter: str = ""  # of these adapters


def sample_batch(samples: int, seed: int, vocabulary: int = 32) -> Sequences:
    """Uneven prompts and responses with every column; one sample is left out of the loss.

    The log-probabilities are what is to be added to the policy's own (`with_policy`): of another policy the clipped
    ratio would be saturated and the KL astronomical.
    """
    random = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (samples,), generator=random).tolist()

    def tokens(sizes: list[int]) -> list[torch.Tensor]:
        # Not the pad token: transformers starts its embedding at zero, where the gradient of the norm is enormous.
        return [torch.randint(1, vocabulary, (size,), generator=random) for size in sizes]

    def logprobs(sizes: list[int]) -> list[torch.Tensor]:
        return [0.3 * torch.randn(size, generator=random) for size in sizes]

    response_lengths = lengths(1, 9)
    batch = sequences_of(
        tokens(lengths(1, 7)),
        tokens(response_lengths),
        advantages=torch.randn(samples, generator=random),
        behaviour_logprobs=logprobs(response_lengths),
        ref_logprobs=logprobs(response_lengths),
        versions=[torch.arange(size) // 3 + index % 2 for index, size in enumerate(response_lengths)],
        trained=[index != 1 for index in range(samples)],
    )
    return replace(batch, version=3)


def make_engine(case: Case, device: Any, **options: Any) -> EmbeddedTrainEngine:
    mesh = Mesh.create(case.layout)
    lora = LoraConfig(**case.lora)
    config = replace(ModelConfig.from_hf(case.checkpoint), adapters=lora.adapters)
    model = Transformer(config, mesh, device, getattr(torch, case.dtype), bucket_bytes=case.bucket_bytes)
    load_weights(model, case.checkpoint)
    if case.adapter:
        load_adapter(model, case.adapter)
    elif config.adapters:
        begin_adapters(model, case.seed)
    defaults = {"lr": 1e-3, "token_budget": 1000, "load_balancing_coef": config.router_aux_coef}
    training = TrainingConfig(**(defaults | case.training), lora=lora)
    training.validate()
    return EmbeddedTrainEngine(model, mesh, device, training, **options)


def with_policy(batch: Sequences, engine: EmbeddedTrainEngine) -> Sequences:
    logprobs, _ = engine.logprobs(batch)
    assert batch.behaviour_logprobs is not None and batch.ref_logprobs is not None
    return replace(
        batch,
        behaviour_logprobs=logprobs + batch.behaviour_logprobs,
        ref_logprobs=logprobs + batch.ref_logprobs,
    )


def my_share(batch: Sequences, engine: EmbeddedTrainEngine) -> Sequences:
    return with_policy(share_of(batch, engine.mesh), engine)


def share_of(batch: Sequences, mesh: Mesh) -> Sequences:
    """The sequences of this rank's replica."""
    replica = mesh.parallel.coordinate("replica", mesh.rank)
    return batch.select(split_over_ranks(batch.lengths, mesh.parallel.replicas)[replica])


def train(rank: int, device: Any, case: Case) -> dict[str, Any]:
    """Metrics of every step, and on rank 0 the whole weights after the last."""
    engine = make_engine(case, device, states=StreamedStates if case.streamed else ResidentStates)
    algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | case.algorithm)), LONGEST)
    steps = []
    for step in range(case.steps):
        metrics: dict[str, float] = {}
        for part in range(case.accumulate):
            batch = my_share(sample_batch(case.samples, case.seed + case.accumulate * step + part), engine)
            found = engine.forward_backward(algorithm.weigh(batch), algorithm.loss)
            metrics |= {f"{part}/{name}": value for name, value in found.items()}
        steps.append(metrics | engine.optimizer_step())
    weights = {name: tensor for name, tensor in gather_tensors(engine.model) if tensor is not None}
    return {"steps": steps, "weights": weights}
