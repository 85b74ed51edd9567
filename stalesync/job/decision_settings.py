"""Resolve the settings of a config that the decisions of a run depend on. Pure: a simulation asks for them, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fusion.colocate.spec import WorkerSpec
from fusion.rollout import HistoPipeSpec, PoolRouting
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.conversations import ConversationSpec

if TYPE_CHECKING:
    from fusion.model import ModelConfig
    from stalesync.job.config import Config

MAX_REFILLS = 10
"""Number of batches of groups that a step may filter before it trains the groups it has."""


def worker_settings(config: Config, model: ModelConfig) -> WorkerSpec:
    """Return what every card needs of the config, without models and tokenizers. ``model``: the policy's shape."""
    cards = config.deployment.reference if config.fusion.score_cards else ()
    return WorkerSpec(
        seed=config.run.seed,
        steps=config.run.steps * config.algorithm.minibatches,
        model=config.model,
        deployment=config.deployment,
        train=config.train_layout,
        infer=config.infer_layout,
        fusion=config.fusion,
        rollout=config.rollout,
        training=config.training,
        algorithm=config.algorithm,
        device=config.device,
        reference=config.score_layout(model, cards) if cards else None,
        ahead=config.stalesync.max_staleness > 0,
    )


def admission_spec(
    config: Config,
    spec: WorkerSpec,
    *,
    scores_overlapped: bool,
    filters: bool,
    by_group: bool,
    num_rows: int,
    machines: Sequence[int] = (),
) -> AdmissionSpec:
    """Return the settings that the decisions of a run depend on. ``by_group``: whether the algorithm's advantages of a
    group depend on no other; ``num_rows``: of the data, 0: without end; ``machines``: the number of the machine of each
    rank, (): all are on one."""
    sharing = {*spec.deployment.shared}
    shared_engines = frozenset(engine for engine, ranks in enumerate(spec.engines) if sharing & {*ranks})
    others_generate = len(shared_engines) < len(spec.engines)
    slots = spec.rollout.engine.max_seqs * spec.infer_of_one_engine.dp
    # A step's gradient, in parts as groups become ready; not at staleness 0, where sums must not depend on timing.
    accumulates = config.stalesync.lend and spec.ahead and config.stalesync.train_tokens is None
    histopipe = HistoPipeSpec(
        num_engines=len(spec.engines),
        engine_slots=slots,
        group_size=config.algorithm.group_size,
        num_classes=spec.rollout.schedule.length_classes,
    )
    return AdmissionSpec(
        group_size=config.algorithm.group_size,
        num_engines=len(spec.engines),
        shared_engines=shared_engines,
        engine_slots=slots,
        max_response_tokens=spec.rollout.sampling_params().max_tokens,
        max_filtered_groups=MAX_REFILLS * config.data.prompts_per_step,
        ahead=spec.ahead,
        scores_overlapped=scores_overlapped,
        keeps_kv=spec.rollout.kv_pool.suspended != "recompute",
        kv_pool=_pool_routing(spec, machines) if spec.rollout.kv_pool.pools_kv else None,
        num_probes=spec.rollout.num_probes,
        chunk_tokens=spec.rollout.max_chunk_tokens,
        order=spec.rollout.schedule.order,
        num_rows=num_rows,
        exact_lengths=_exact_lengths(spec, config.algorithm.group_size),
        histopipe=histopipe if spec.rollout.schedule.order == "histopipe" else None,
        lends=others_generate and scores_overlapped and by_group and accumulates,
        minibatches=config.algorithm.minibatches,
        filters=filters,
        turns=spec.turns,
    )


def conversation_spec(config: Config) -> ConversationSpec:
    environment = config.environment
    return ConversationSpec(
        max_turns=environment.max_turns,
        max_tokens=config.rollout.max_response_length,
        episode_timeout_s=environment.episode_timeout_s,
        retries=environment.retries,
        sums_rewards=environment.reward == "sum",
        needs_reward=config.reward.kind == "environment",
    )


def _pool_routing(spec: WorkerSpec, machines: Sequence[int]) -> PoolRouting:
    pool = spec.rollout.kv_pool
    return PoolRouting(
        pool.spread,
        pool.pull_tokens,
        [tuple(machines[rank] for rank in ranks) for ranks in spec.engines] if machines else (),
        remote=pool.remote != "none",
    )


def _exact_lengths(spec: WorkerSpec, group_size: int) -> Callable[[str], Sequence[int]]:
    """Return what gives the lengths of a group's responses where they are forced and ordered by (0.2 ms a group)."""
    if spec.rollout.schedule.order != "oracle":
        return lambda group: ()
    from stalesync.prompts.lengths import ForcedLengths  # which loads more than a decision needs

    lengths = ForcedLengths.of(spec.rollout, spec.seed)
    return lambda group: () if lengths is None else lengths.of_members(group, range(group_size))
