"""Resolve the settings that the decisions of a run depend on. Pure: a simulation asks for them, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.colocate.spec import WorkerSpec
from fusion.rollout.router import PoolRouting
from stalesync.admission import MAX_REFILLS, AdmissionSpec
from stalesync.config import Config
from stalesync.prompts.lengths import ForcedLengths


def admission_spec(config: Config, spec: WorkerSpec, *, scores_beside: bool, filters: bool) -> AdmissionSpec:
    """Returns the settings that the decisions of a run depend on."""
    sharing = {*spec.deployment.shared}
    return AdmissionSpec(
        group_size=config.algorithm.group_size,
        num_engines=len(spec.engines),
        shared_engines=frozenset(engine for engine, ranks in enumerate(spec.engines) if sharing & {*ranks}),
        engine_slots=spec.rollout.max_seqs * spec.infer_of_one_engine.dp,
        max_response_tokens=spec.rollout.sampling().max_tokens,
        max_filtered_groups=MAX_REFILLS * config.data.prompts_per_step,
        ahead=spec.ahead,
        scores_beside=scores_beside,
        keeps_kv=spec.rollout.keeps_kv or spec.rollout.pools_kv,
        kv_pool=PoolRouting(spec.rollout.kv_spread, spec.rollout.kv_pull_tokens) if spec.rollout.pools_kv else None,
        num_probes=spec.rollout.num_probes,
        chunk_tokens=spec.rollout.max_chunk_tokens,
        order=spec.rollout.order,
        exact_lengths=_exact_lengths(spec, config.algorithm.group_size),
        filters=filters,
    )


def _exact_lengths(spec: WorkerSpec, group_size: int) -> Callable[[str], Sequence[int]]:
    """Returns the function that gives the lengths of a group's responses where they are forced, for the order
    `oracle`."""
    lengths = ForcedLengths.of(spec.rollout, spec.seed)
    return lambda group: () if lengths is None else lengths.of_members(group, range(group_size))
