"""Resolve the settings that the decisions of a run depend on. Pure: a simulation asks for them, too."""

from __future__ import annotations

from fusion.colocate.spec import WorkerSpec
from stalesync.admission import MAX_REFILLS, AdmissionSpec
from stalesync.config import Config


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
        keeps_kv=spec.rollout.keeps_kv,
        num_probes=spec.rollout.num_probes,
        chunks=spec.rollout.chunk_tokens is not None,
        filters=filters,
    )
