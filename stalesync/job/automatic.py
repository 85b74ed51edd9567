"""Resolve the keys that are `auto`: what pays where responses are long. Pure: the same config gives the same values.

    rollout.schedule.chunk_tokens=auto ─┐            ┌─► an eighth of rollout.max_response_length, or null
    rollout.drafts.source=auto         ─┼─ resolve ──┼─► both, or none
    rollout.engine.block_size          ─┘            └─► a multiple of what the ranks of parallel.infer.dcp divide

Invariants (property-tested in tests/stalesync/job/test_automatic.py):
1. Values that are stated stay, and no `auto` is left.
2. An `auto` becomes chunks or drafts only where responses may have `LONG` tokens and either results do not depend on
   batching (`rollout.engine.batch_invariant`) or steps run ahead (`stalesync.max_staleness` > 0).
3. On a resume it becomes what the run has resolved before, whatever else has changed.
4. It never becomes what the machine cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusion.inference.config import AUTO, BLOCK_MULTIPLE
from fusion.telemetry.keys import as_yaml
from stalesync.job.keys import value_of

if TYPE_CHECKING:
    from stalesync.job.config import Config

LONG = 1024
"""Value of `rollout.max_response_length` from which chunks and drafts are taken to pay"""
CHUNKS = 8
"""Chunks of a response of maximum length, as of Seer's, which are of about 8,000 of 65,536 tokens"""
AUTOMATIC = CHUNK_TOKENS, DRAFTS = "rollout.schedule.chunk_tokens", "rollout.drafts.source"


def pays(config: Config) -> bool:
    """Whether chunks and drafts are on where nothing is stated."""
    repeats = config.stalesync.max_staleness > 0 or config.rollout.engine.batch_invariant
    return repeats and config.rollout.max_response_length >= LONG


def resolve(config: Config, *, can_build: bool, kept: Mapping[str, Any]) -> Config:
    """Return a copy of the config without `auto`. ``can_build``: whether the machine has the library of drafts, or can
    build it; ``kept``: by key, what the run that is resumed has resolved."""
    rollout, on = config.rollout, pays(config)
    schedule, drafts = rollout.schedule, rollout.drafts
    if schedule.chunk_tokens == AUTO:
        chunk_tokens = rollout.max_response_length // CHUNKS if on else None
        schedule = replace(schedule, chunk_tokens=kept.get(CHUNK_TOKENS, chunk_tokens))
    if drafts.source == AUTO:
        source = kept.get(DRAFTS, "both" if on else "none")
        drafts = replace(drafts, source=source if can_build else "none")
    limits, dcp = rollout.engine, config.parallel.infer.dcp
    if dcp > 1 and limits.block_size % BLOCK_MULTIPLE == 0:
        multiple = BLOCK_MULTIPLE * dcp
        limits = replace(limits, block_size=-(-limits.block_size // multiple) * multiple)
    return replace(config, rollout=replace(rollout, schedule=schedule, drafts=drafts, engine=limits))


def unresolved(config: Config) -> list[str]:
    """List the keys that are `auto` in a job with responses that are long enough for it."""
    is_long = config.rollout.max_response_length >= LONG
    return [key for key in AUTOMATIC if is_long and value_of(config, key) == AUTO]


def describe(stated: Config, resolved: Config) -> str:
    """Return a line of what `auto` has become; "" if nothing is `auto`."""
    keys = [key for key in AUTOMATIC if value_of(stated, key) == AUTO]
    values = " ".join(f"{key}={as_yaml(value_of(resolved, key))}" for key in keys)
    return f"resolved from auto: {values}" if values else ""
