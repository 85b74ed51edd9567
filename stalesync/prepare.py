"""Prepare a job before Ray starts: read its tokenizer, data and evaluations, and start and check its rewards."""

import logging
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fusion.colocate import RewardModelSpec, WorkerSpec
from fusion.colocate.frozen.retokenize import same_tokenizer
from fusion.model import ModelConfig
from fusion.rewards import RewardPool, Term, check_answers
from fusion.rewards.answers import call_once
from fusion.rewards.terms import check_term_fields, pools_of, start_terms
from fusion.rollout.detokenize import detokenizer_spec
from fusion.rollout.kv_pool.pool import KVPoolSpec
from stalesync.evaluation.files import EvalFile, OpenedFile, open_files, with_rewards
from stalesync.job.config import Config
from stalesync.job.decision_settings import worker_settings
from stalesync.job.tokenizer_folder import end_token_ids, load_tokenizer, masked_ids, num_ids
from stalesync.prompts import ChatTemplate, PromptSource
from stalesync.prompts.environments import Environments

log = logging.getLogger(__name__)


def prepare(config: Config, model: ModelConfig) -> tuple[Any, PromptSource, list[OpenedFile], WorkerSpec]:
    """Read the tokenizer and every row of a job whose config is valid, and log what its user may not expect. Return
    tokenizer, prompts, the files of its evaluations, and what the cards need; raise ValueError, by key, for what cannot
    be used."""
    tokenizer = load_tokenizer(config.model.path, model)
    source = PromptSource(config.data, tokenizer, config.run.seed, held_out=config.run.eval_prompts)
    opened = open_files(config, tokenizer)
    for line in source.template.describe(end_token_ids(tokenizer, model, config.model.path)):
        log.warning("model.path: %s", line)
    spec = worker_spec(config, model, tokenizer)
    warn_if_endless(config, spec)
    return tokenizer, source, opened, spec


def start_rewards(
    stack: ExitStack, config: Config, source: PromptSource, opened: Sequence[OpenedFile], num_answers: int = 64
) -> tuple[RewardPool | None, list[Term], list[EvalFile], list[str]]:
    """Start the processes of a job's rewards, which end with ``stack``, check the fields of the data and up to
    ``num_answers`` of its reference answers, and call each reward once. Return the reward itself (None: a reward model
    or an environment), its terms, the files of the evaluations, and a line for each call. Raise ValueError if a reward
    cannot be loaded, lacks a field, returns no reward, or can match no reference answer."""
    rule = None
    if config.reward.kind not in ("model", "environment"):
        rule = stack.enter_context(RewardPool(config.reward))
    if rule is not None:
        rule.check_fields(source.rows.fields)
    terms = start_terms(config.reward, lambda reward, spec: stack.enter_context(RewardPool(reward, spec)))
    check_term_fields(terms, source.rows.fields)
    for line in check_answers(pools_of(rule, terms), source.reference_answers(num_answers)):
        log.warning("%s", line)
    num_held_out = config.run.eval_prompts
    held_out = source.evaluation(num_held_out) if num_held_out else []
    if num_held_out and not held_out:
        config.eval.check_best(held_out=False)
        at_most = f"at most a tenth of {len(source.rows.usable)}"
        log.warning("run.eval_prompts=%d: no row of %s is held out, %s", num_held_out, config.data.source, at_most)
    files = with_rewards(
        config,
        opened,
        held_out=held_out,
        held_out_rows=source.counts(held_out, num_held_out),
        rule=rule,
        terms=terms,
        start=lambda reward: stack.enter_context(RewardPool(reward)),
        num_answers=num_answers,
    )
    (prompt,) = source.sample(1)
    asked = {file.pool: (f"eval.files: {file.name!r}: ", file.prompts[0]) for file in files}
    asked |= {term.pool: (f"reward.terms[{index}] ({term.spec.name}): ", prompt) for index, term in enumerate(terms)}
    asked[rule] = "", prompt
    pools = [(pool, *asked[pool]) for pool in reversed(asked) if pool is not None]
    group_size = config.algorithm.group_size
    calls = [call_once(pool, one.for_reward(""), group_size=group_size, key=key) for pool, key, one in pools]
    return rule, terms, files, calls


def start_environments(
    stack: ExitStack, config: Config, source: PromptSource, spec: WorkerSpec
) -> tuple[Environments | None, list[str]]:
    """Start the processes of a job's environments, which end with ``stack``, and begin one conversation. Return them
    (None: the model speaks in one turn), and lines that describe them. Raise ValueError if the environment cannot be
    loaded or does not begin, or the chat template cannot be continued."""
    if not config.converses:
        return None, []
    from fusion.environments.render import Bridge

    assert spec.detokenizer is not None
    bridge = Bridge(source.template, spec.detokenizer.end_token_ids)
    environments = stack.enter_context(
        Environments(config.environment, bridge, config.run.seed, config.data.max_prompt_length)
    )
    (prompt,) = source.sample(1)
    started = environments.begin([prompt])[prompt.id]
    if started.failure:
        raise ValueError(
            f"{config.environment.label}: {prompt.id} does not begin ({started.failure}): {started.detail}"
        )
    begun = environments.prompt(prompt, started)
    return environments, [f"{config.environment.label}: a conversation begins with {len(begun.ids)} tokens"]


def worker_spec(config: Config, model: ModelConfig, tokenizer: Any) -> WorkerSpec:
    """Return the part of the config that every card needs; raise ValueError if the reward model has fewer tokens than
    the policy's tokenizer, whose ids it would have to read."""
    turn_end = ChatTemplate(config.data, tokenizer).turn_end
    ends = end_token_ids(tokenizer, model, config.model.path, turn_end)
    pool = None
    if config.rollout.kv_pool.pools_kv:
        pool = KVPoolSpec.of(config.rollout.kv_pool, run=secrets.token_hex(8), takes_suspended=config.pools_suspended)
    return replace(
        worker_settings(config, model),
        reward_model=_reward_model(config, tokenizer) if config.reward.model else None,
        topology=config.cluster.topology,
        pace=config.pace,
        detokenizer=detokenizer_spec(config.model.path, tokenizer, ends),
        kv_pool=pool,
        masked_ids=masked_ids(tokenizer, model, ends),
        turns=config.converses,
    )


def _reward_model(config: Config, tokenizer: Any) -> RewardModelSpec:
    path = config.reward.model
    assert path is not None
    model = ModelConfig.from_hf(path)
    retokenize = not same_tokenizer(config.model.path, path)
    if not retokenize and model.vocab_size < num_ids(tokenizer):
        raise ValueError(
            f"reward.model: {path} has vocab_size={model.vocab_size} and no tokenizer; the policy's tokenizer has "
            f"{num_ids(tokenizer)} tokens"
        )
    return RewardModelSpec(path, config.score_layout(model, config.deployment.reward_model), retokenize)


def warn_if_endless(config: Config, spec: WorkerSpec) -> None:
    """Warn if nothing but the limit ends a response."""
    rollout = config.rollout
    assert spec.detokenizer is not None
    if not (spec.detokenizer.end_token_ids or rollout.sampling.stop or rollout.sampling.forced_median):
        log.warning(
            "model.path: %s names no end token (eos_token_id): every response will be "
            "rollout.max_response_length=%d tokens long; name one, or set rollout.sampling.stop",
            config.model.path,
            rollout.max_response_length,
        )
