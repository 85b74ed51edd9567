"""The synchronous loop as one reads it in a paper: no controller, no queue, no Ray, no switch; trainer and engine on
one card, a copy of the weights between them. What staleness 0 has to equal, to the bit; and its training alone, of what
a run above 0 has trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from fusion.inference import EmbeddedEngine, Request
from fusion.model import Mesh, ModelConfig, Transformer, load_weights, save_folder
from fusion.npu import open_device
from fusion.rewards.arithmetic import arithmetic
from fusion.training import EmbeddedTrainEngine, Sequences, split_over_ranks
from fusion.training.algorithms import make_algorithm
from stalesync.job.config import Config
from stalesync.prompts import PromptSource
from tests.training.sequences import sequences_of


def run(config: Config, export: Path) -> list[float]:
    """Mean rewards of `config.run.steps` steps on one emulated card, by the rule `arithmetic`; the weights after them
    are in the Hugging Face folder ``export``."""
    trainer, tokenizer = _trainer(config), AutoTokenizer.from_pretrained(config.model.path)
    policy, mesh, device = trainer.model, trainer.mesh, trainer.device
    served = Transformer(
        policy.config,
        mesh,
        device,
        config.model.torch_dtype,
        bucket_bytes=config.fusion.bucket_bytes,
        batch_invariant=config.rollout.engine.batch_invariant,
    )
    served.requires_grad_(False)
    engine = EmbeddedEngine(served, mesh, device, config.rollout, config.run.seed)
    source = PromptSource(config.data, tokenizer, config.run.seed)
    algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
    rewards = []
    for version in range(config.run.steps):
        for theirs, ours in zip(served.weights.flats, policy.weights.flats, strict=True):
            theirs.copy_(ours.detach())
        engine.policy_version = version
        engine.allocate_kv()
        prompts = {prompt.id: prompt for prompt in source.next()}
        members = range(config.algorithm.group_size)
        params = config.rollout.sampling_params()
        engine.submit([Request(f"{p.id}/{k}", p.ids, params, p.id) for p in prompts.values() for k in members])
        outputs = sorted(engine.run(), key=lambda output: output.request_id)
        engine.release_kv()
        texts = [tokenizer.decode(one.tokens[: -1 if one.finish_reason == "stop" else None]) for one in outputs]
        found = [
            arithmetic(prompts[one.group].text, text, prompts[one.group].answer)
            for one, text in zip(outputs, texts, strict=True)
        ]
        rewards.append(sum(found) / len(found))
        sizes = [len(one.tokens) for one in outputs]
        values, _ = algorithm.advantages(found, [one.group for one in outputs], sizes)
        (order,) = split_over_ranks([len(one.prompt) + len(one.tokens) for one in outputs], 1)
        chosen = [outputs[i] for i in order]
        trainer.allocate_gradients()
        batch = sequences_of(
            [one.prompt for one in chosen],
            [one.tokens for one in chosen],
            advantages=values[order],
            behaviour_logprobs=[one.logprobs for one in chosen],
        )
        trainer.forward_backward(algorithm.weigh(batch), algorithm.loss)
        trainer.optimizer_step()
    save_folder(policy, export, tokenizer_from=config.model.path)
    return rewards


def train(config: Config, steps: Iterable[Sequence[Sequence[Sequences]]]) -> Iterator[dict[str, torch.Tensor]]:
    """Train the minibatches of each step, each in parts, in one of which an update follows; yield the weights by name
    after each step."""
    trainer, algorithm = _trainer(config), make_algorithm(config.algorithm, config.rollout.max_response_length)
    for minibatches in steps:
        trainer.allocate_gradients()
        if config.algorithm.corrects_by == "decoupled":  # what is accumulated before has no update between
            minibatches = [
                [*parts, replace(last, proximal_logprobs=trainer.logprobs(last)[0])] for *parts, last in minibatches
            ]
        for number, parts in enumerate(minibatches):
            for part_number, part in enumerate(parts):
                batch = replace(algorithm.weigh(part), updated=number > 0)
                trainer.forward_backward(batch, algorithm.loss, continued=part_number > 0)
            trainer.optimizer_step()
        yield _weights(trainer)


def _weights(trainer: EmbeddedTrainEngine) -> dict[str, torch.Tensor]:
    return {name: one.detach().cpu().clone() for name, one in trainer.model.named_parameters()}


def _trainer(config: Config) -> EmbeddedTrainEngine:
    """One card that trains the model of a run."""
    device, mesh, shape = open_device("emulated"), Mesh.single(), ModelConfig.from_hf(config.model.path)
    policy = Transformer(shape, mesh, device, config.model.torch_dtype, bucket_bytes=config.fusion.bucket_bytes)
    load_weights(policy, config.model.path)
    return EmbeddedTrainEngine(policy, mesh, device, config.training, temperature=config.rollout.sampling.temperature)
