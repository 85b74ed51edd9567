"""Decide what a resume does with every setting that has changed since its checkpoint. Pure.

    settings of the checkpoint ─┐                              ┌─► a line that lists every change
    settings of the resume     ─┼─► decide(changes, …) ────────┼─► whether the groups in progress end
    digests that differ        ─┘                              └─► ValueError: what is refused, by key

Groups in progress have samples that were generated, scored or filtered under the settings of the checkpoint. What they
depend on may change only if there are none, or if the key is named in `run.resume_changed`: they then end as
`failed:resume_changed`.

Invariants (property-tested in tests/stalesync/job/test_resume_rules.py):
1. Every key of the config has exactly one rule.
2. Without a change nothing is refused, and no group ends.
3. A key that is refused is accepted when it is named, except where the rule is `NEVER`; no other key has to be named.
4. Groups in progress end exactly if a named key is of a rule that refuses because of them.
5. A name that is refused by no rule is refused itself."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fusion.telemetry.keys import as_yaml
from stalesync.job.overrides import known_keys

ENDED = "resume_changed"
"""Why groups in progress fail"""


class Rule(Enum):
    """What a resume does with a key."""

    FOLDER = "finds the run, and is not compared"
    NOW = "applies from the next step on"
    NEW_GROUPS = "applies to groups that are admitted from now on"
    NO_GROUPS = "is refused while groups are in progress"
    NOT_LOWER = "is refused while groups are in progress if it is lower than before"
    SAME_TRUNCATION = "is refused while groups are in progress if truncated sampling begins or ends with it"
    CONTENT = "may change its path; other content is refused"
    NO_GROUPS_CONTENT = "is refused while groups are in progress; other content behind the same value is refused"
    ORDER = "is refused if the order of prompts would be another one"
    NEVER = "is refused"


_KEYS = {
    Rule.FOLDER: "run.name run.dir run.resume run.resume_changed",
    Rule.NOW: """
        run.steps run.save_every run.keep run.max_engine_restarts run.loggers run.profile_steps
        run.sample_characters
        parallel.*
        fusion.deployment fusion.infer_cards fusion.score_cards fusion.resident fusion.bucket_bytes fusion.offload
        fusion.double_buffer fusion.checksum
        rollout.backend rollout.engine.* rollout.schedule.* rollout.kv_pool.* rollout.drafts.*
        training.backend training.lr training.betas training.weight_decay training.clip_grad training.schedule
        training.warmup_steps training.token_budget training.recompute training.load_balancing_coef
        training.load_balancing training.router_bias_rate training.share_prefixes
        algorithm.clip_low algorithm.clip_high algorithm.kl_coef algorithm.kl_in algorithm.normalize_advantages
        algorithm.loss_aggregation algorithm.overlong_buffer algorithm.correction algorithm.correction_cap
        algorithm.correction_floor algorithm.minibatches
        environment.step_timeout_s environment.episode_timeout_s environment.retries environment.workers
        environment.memory_mib
        reward.time_limit_s reward.workers reward.latency_s reward.memory_mib reward.max_failed_share
        eval.every eval.samples eval.temperature eval.top_k eval.top_p eval.min_p eval.max_response_length
        eval.pass_reward eval.best
        queue.durability queue.max_bytes queue.spill
        stalesync.train_tokens stalesync.lend
        cluster.npus cluster.address cluster.hardware cluster.stage_timeout_s
        device.kind device.capacity_bytes device.operators device.streams device.host_bytes_per_s
        device.wire_bytes_per_s device.deterministic device.pace device.pace_tokens device.pace_speed
        device.pace_training""",
    Rule.NEW_GROUPS: """
        data.prompt_field data.answer_field data.long_prompts data.chat_template data.min_digits data.max_digits
        data.max_terms data.chat_template_kwargs data.system_prompt""",
    Rule.NO_GROUPS: """
        rollout.max_response_length rollout.sampling.temperature rollout.sampling.stop rollout.sampling.forced_*
        algorithm.name algorithm.group_size algorithm.replay
        environment.max_turns environment.tools environment.reward""",
    Rule.NOT_LOWER: "rollout.max_length data.prompts_per_step data.max_prompt_length stalesync.max_staleness",
    Rule.SAME_TRUNCATION: "rollout.sampling.top_k rollout.sampling.top_p rollout.sampling.min_p",
    Rule.CONTENT: "model.path eval.files",
    Rule.NO_GROUPS_CONTENT: """
        reward.name reward.path reward.model reward.terms environment.name environment.path""",
    Rule.ORDER: "data.source data.rows data.bad_rows run.eval_prompts",
    Rule.NEVER: "run.seed model.dtype model.adapter training.lora.*",
}
"""Patterns of keys by rule"""
RULES = {
    key: rule
    for rule, patterns in _KEYS.items()
    for pattern in patterns.split()
    for key in fnmatch.filter(known_keys(), pattern)
}
"""The rule of every key"""

UNRESOLVED = {"device.operators": "auto"}
"""Key → its new value that is resolved, and compared, when the kind of the cards is known"""

_NEVER = {
    "run.seed": "the order of prompts and the noise of every token follow from it",
    "model.dtype": "masters and moments are those of the saved data type",
    "model.adapter": "the saved adapters are trained further",
    **dict.fromkeys((key for key in RULES if key.startswith("training.lora.")), "the saved adapters are of this shape"),
}


@dataclass(frozen=True)
class ResumeChanges:
    """What differs between a checkpoint and the start that resumes it. ``settings``: by key, the saved value and the
    new one; ``content``: by key, what has other content: names of files; of data.source why prompts would have another
    order; ``num_groups``: groups in progress; ``truncation``: whether truncated sampling begins or ends: only samples
    of one kind have records of kept ids."""

    settings: Mapping[str, tuple[Any, Any]]
    content: Mapping[str, str]
    num_groups: int
    truncation: bool = False

    def describe(self) -> str:
        """Return a line that lists every change; "" if there is none."""
        listed = [f"{key}={as_yaml(new)} (was {as_yaml(old)})" for key, (old, new) in sorted(self.settings.items())]
        listed += [f"{key} ({what})" for key, what in sorted(self.content.items())]
        return f"settings changed by this resume: {', '.join(listed)}" if listed else ""


def compare(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return saved and new value of the settings that differ. Keys that only one of the two has are left out: of other
    versions; and those of `UNRESOLVED`."""
    common = [key for key in saved if key in new and RULES[key] is not Rule.FOLDER]
    changed = {key: (saved[key], new[key]) for key in common if saved[key] != new[key]}
    return {key: values for key, values in changed.items() if UNRESOLVED.get(key, values) != values[1]}


def decide(changes: ResumeChanges, named: Collection[str], undecided: Collection[str] = ()) -> bool:
    """Check the changes; return whether the groups in progress end. ``named``: `run.resume_changed`; ``undecided``:
    keys whose content is not compared to its end yet: their names may turn out to be superfluous. Raise ValueError if a
    change is refused, or a name is superfluous; names every such key and what is possible."""
    in_progress = _keys_in_progress(changes)
    refused = in_progress | changes.content.keys()
    if never := sorted(key for key in changes.settings if RULES[key] is Rule.NEVER):
        lines = [
            f"{key}={as_yaml(new)}: cannot resume: expected {as_yaml(old)}, as {_NEVER[key]}"
            for key, (old, new) in ((key, changes.settings[key]) for key in never)
        ]
        raise ValueError("; ".join(lines))
    if unnamed := sorted(refused - {*named}):
        lines = [_refusal(key, changes, in_progress=key in in_progress) for key in unnamed]
        allowed = ",".join(sorted({*named} & refused | {*unnamed}))
        raise ValueError(f"{'; '.join(lines)}. run.resume_changed=[{allowed}] resumes nevertheless")
    if names := superfluous(changes, named, undecided):
        raise ValueError(
            f"run.resume_changed: {', '.join(names)}: expected only keys whose change this resume would refuse"
            + (f": {', '.join(sorted(refused))}" if refused else ", of which there are none")
        )
    return bool(in_progress)


def superfluous(changes: ResumeChanges, named: Collection[str], undecided: Collection[str] = ()) -> list[str]:
    """List the names that are refused by no rule; arguments as of `decide`."""
    return sorted({*named} - _keys_in_progress(changes) - changes.content.keys() - {*undecided})


def _keys_in_progress(changes: ResumeChanges) -> set[str]:
    return {key for key in {*changes.settings, *changes.content} if _needs_no_groups(key, changes)}


def _needs_no_groups(key: str, changes: ResumeChanges) -> bool:
    if not changes.num_groups:
        return False
    if RULES[key] is Rule.NOT_LOWER:
        old, new = changes.settings[key]
        return new is not None and (old is None or new < old)
    if RULES[key] is Rule.SAME_TRUNCATION:
        return changes.truncation
    return RULES[key] is Rule.NO_GROUPS_CONTENT or (RULES[key] is Rule.NO_GROUPS and key in changes.settings)


def _refusal(key: str, changes: ResumeChanges, in_progress: bool) -> str:
    ends = f"; {changes.num_groups} groups in progress would end as failed:{ENDED}" if in_progress else ""
    if key in changes.content:
        return f"{key}: cannot resume: {changes.content[key]}{ends}"
    old, new = changes.settings[key]
    return f"{key}={as_yaml(new)}: cannot resume where groups in progress were begun with {as_yaml(old)}{ends}"
