"""The synchronous loop as one reads it in a paper: no controller, no queue, no Ray, no switch; trainer and engine on
one card, a copy of the weights between them. What staleness 0 has to equal, to the bit."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from fusion.inference import EmbeddedEngine, Request
from fusion.model import Mesh, ModelConfig, Transformer, load_weights, save_folder
from fusion.npu import open_device
from fusion.rewards.arithmetic import arithmetic
from fusion.training import EmbeddedTrainEngine, split_over_ranks
from fusion.training.algorithms import make_algorithm
from stalesync.job.config import Config
from stalesync.prompts import PromptSource
from tests.training.sequences import sequences_of


def run(config: Config, export: Path) -> list[float]:
    """Mean rewards of `config.run.steps` steps on one emulated card, by the rule `arithmetic`; the weights after them
    are in the Hugging Face folder ``export``."""
    device, mesh = open_device("emulated"), Mesh.single()
    shape = ModelConfig.from_hf(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    dtype, bucket_bytes = config.model.torch_dtype, config.fusion.bucket_bytes
    policy = Transformer(shape, mesh, device, dtype, bucket_bytes=bucket_bytes)
    served = Transformer(
        shape, mesh, device, dtype, bucket_bytes=bucket_bytes, batch_invariant=config.rollout.engine.batch_invariant
    )
    load_weights(policy, config.model.path)
    served.requires_grad_(False)
    trainer = EmbeddedTrainEngine(
        policy, mesh, device, config.training, temperature=config.rollout.sampling.temperature
    )
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
