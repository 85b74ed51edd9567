"""Check keys of a config against those of other groups.

Each check raises a ValueError that names the key to change, or both numbers that conflict. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fusion.colocate.share import InferenceShare
from fusion.inference.config import check_context, check_graphs
from fusion.model.peft_folder import adapter_params, check_adapter
from fusion.telemetry.validation import Checks

if TYPE_CHECKING:
    from fusion.model import ModelConfig
    from stalesync.job.config import Config


def check_learns(config: Config) -> None:
    """Refuse settings under which all advantages are 0, whatever the rewards."""
    sampling = config.rollout.sampling
    check = Checks("rollout.sampling", sampling)
    same = "as otherwise all responses to a prompt are the same and nothing is learned"
    check.that("temperature", sampling.temperature > 0, f"above 0, {same}; eval.temperature=0 evaluates greedily")
    check.that("top_k", sampling.top_k != 1, f"0, or at least 2, {same}")
    check.that("min_p", sampling.min_p < 1, f"below 1, {same}")
    check = Checks("data", config.data)
    several = config.data.prompts_per_step * config.algorithm.group_size > 1
    check.that("prompts_per_step", several, "at least 2 with algorithm.group_size=1, as rewards are compared")


def check_environment(config: Config) -> None:
    """Refuse what conversations exclude, and rewards of an environment without one."""
    if not config.converses:
        if config.reward.kind == "environment":
            raise ValueError("reward.name=environment: expected another one with environment.name=single")
        return
    if config.data.chat_template != "auto":
        raise ValueError(
            f"data.chat_template={config.data.chat_template}: expected auto with environment.name="
            f"{config.environment.name}, as its messages are rendered by the template"
        )
    timeout_s = config.environment.episode_timeout_s
    if timeout_s >= config.cluster.stage_timeout_s:
        raise ValueError(
            f"environment.episode_timeout_s={timeout_s:g}: expected less than cluster.stage_timeout_s="
            f"{config.cluster.stage_timeout_s:g}, after which a run without a sample ends"
        )


def check_adapters(config: Config, model: ModelConfig) -> None:
    """Refuse adapters that no matrix of the model can have, files of others, and what would change the base."""
    lora = config.training.lora
    if lora.adapters is None:
        return
    adapted = replace(model, adapters=lora.adapters)
    if not adapter_params(adapted):
        raise ValueError(f"training.lora.targets={lora.targets}: {config.model.path} has no such matrices")
    Checks("training", config.training).that(
        "router_bias_rate", config.training.router_bias_rate == 0, "0 with training.lora, which trains adapters alone"
    )
    if config.model.adapter:
        check_adapter(config.model.adapter, adapted)


def check_minibatches(config: Config) -> None:
    """Check that a step's prompts can be divided into minibatches."""
    prompts, minibatches = config.data.prompts_per_step, config.algorithm.minibatches
    if prompts % minibatches:
        raise ValueError(f"algorithm.minibatches={minibatches} does not divide data.prompts_per_step={prompts}")


def check_batches(config: Config, model: ModelConfig) -> None:
    """Refuse batches without a sample for each replica, and samples longer than what is to hold them."""
    prompts, algorithm = config.data.prompts_per_step, config.algorithm
    minibatches, group = algorithm.minibatches, algorithm.group_size
    samples, replicas = prompts // minibatches * group, config.train_layout.replicas
    if samples < replicas:
        raise ValueError(
            f"a minibatch has {samples} samples (data.prompts_per_step={prompts} / algorithm.minibatches="
            f"{minibatches} x algorithm.group_size={group}), fewer than the {replicas} data-parallel replicas of "
            f"parallel.train on cluster.npus={config.cluster.npus}"
        )
    if (probe := config.rollout.schedule.probe) and probe >= group:
        raise ValueError(f"rollout.schedule.probe={probe}: expected fewer than algorithm.group_size={group}")
    buffer, response = algorithm.overlong_buffer, config.rollout.max_response_length
    if buffer is not None and buffer > response:
        raise ValueError(f"algorithm.overlong_buffer={buffer} exceeds rollout.max_response_length={response}")
    longest = config.longest_sample
    if longest > model.max_positions:
        raise ValueError(
            f"data.max_prompt_length={config.data.max_prompt_length} + rollout.max_response_length="
            f"{config.rollout.max_response_length} exceeds the model's max_position_embeddings={model.max_positions}"
        )
    if config.rollout.max_length is not None and longest > config.rollout.max_length:
        raise ValueError(
            f"rollout.max_length={config.rollout.max_length}: expected null, or at least the longest sample, "
            f"data.max_prompt_length + rollout.max_response_length = {longest} tokens"
        )
    InferenceShare.of(config.rollout, engines=1).check_longest(config.rollout, longest)
    if longest > config.training.token_budget:
        raise ValueError(
            f"training.token_budget={config.training.token_budget} is less than the longest sample, "
            f"data.max_prompt_length + rollout.max_response_length = {longest} tokens"
        )


def check_generation(config: Config) -> None:
    """Refuse an order of two steps for one, KV that nothing would pool, shared KV where bits matter, and graphs that no
    card captures."""
    check_context(config.rollout, config.parallel.infer.dcp)
    check_graphs(config.rollout, config.device.kind, config.device.operators)
    check_order(config)
    if config.rollout.kv_pool.pools_kv and not (config.rollout.max_chunk_tokens or config.pools_suspended):
        raise ValueError(
            "rollout.kv_pool.suspended=pool: expected rollout.schedule.chunk_tokens below "
            f"rollout.max_response_length={config.rollout.max_response_length}, or fusion.deployment=hybrid and "
            "stalesync.max_staleness > 0: otherwise no request leaves its engine before its KV is freed"
        )


def check_order(config: Config) -> None:
    """Refuse an order of two steps for one."""
    if config.rollout.schedule.order == "histopipe" and not config.stalesync.max_staleness:
        raise ValueError(
            "rollout.schedule.order=histopipe: expected another one with stalesync.max_staleness=0, as it orders "
            "two steps such that the second begins before the first has ended"
        )


def check_experts(config: Config, model: ModelConfig) -> None:
    """Refuse what acts on routers that the model lacks."""
    if config.algorithm.replay != "none" and not model.num_experts:
        raise ValueError(f"algorithm.replay={config.algorithm.replay!r}: expected none, as the model is dense")
    if config.training.router_bias_rate and not (model.num_experts and model.experts.router.correction):
        raise ValueError(
            f"training.router_bias_rate={config.training.router_bias_rate}: expected 0, as the routers of "
            f"{config.model.path} have no correction bias"
        )
