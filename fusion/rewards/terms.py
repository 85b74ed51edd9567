"""Define the terms of `reward.terms`, start their processes, and add them to a reward.

    total = reward + Σ weight · term            a sample of which any part failed is not scored

Invariants (property-tested): a total is the weighted sum of its parts, which stay with it by name; a sample fails if
and only if a part failed, with the error of the first, and its detail names that part, or the sum is not `usable`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusion.rewards.outcome import RewardOutcome, RewardSample, usable
from fusion.telemetry.validation import Checks, fields_of

if TYPE_CHECKING:
    from fusion.rewards.config import RewardConfig, RewardSpec
    from fusion.rewards.guard import RewardPool

SHAPES = ("format", "length")
"""Terms that are not rewards of their own"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class TermSpec:
    """A term of `reward.terms`, checked.
    ``reward``: `arithmetic`, `math`, `file.py:function`, `format` or `length`.
    ``name``: in metrics.
    ``weight``: factor of the term in the total.
    ``pattern``: of `format`: a regular expression; the term is 1 if it matches the whole response, else 0.
    ``free_tokens``, ``max_tokens``: of `length`: the term is 0 up to ``free_tokens``, and falls to -1 at
    ``max_tokens``."""

    reward: str
    name: str
    weight: float = 1.0
    pattern: str | None = None
    free_tokens: int | None = None
    max_tokens: int | None = None

    @classmethod
    def parse(cls, entry: Any, key: str, built_in: Collection[str]) -> TermSpec:
        """Read an entry of `reward.terms`.
        ``key``: of the entry, for messages: `reward.terms[0]`.
        ``built_in``: names of the rules.
        Raise ValueError: it is not accepted; names the key."""
        fields = fields_of(entry, [item.name for item in dataclasses.fields(cls)], key)
        spec = cls(**{"name": fields["reward"].rpartition(":")[2], **fields})
        spec.validate(key, built_in)
        return spec

    def validate(self, key: str, built_in: Collection[str]) -> None:
        """Check every field. Raise ValueError: a field that is not accepted, by key."""
        check = Checks(key, self)
        check.that("name", isinstance(self.name, str) and bool(NAME.fullmatch(self.name)), "letters, digits, . _ -")
        check.number("weight")
        known = (*built_in, *SHAPES)
        check.that("reward", self.reward in known or ":" in self.reward, f"{', '.join(known)} or file.py:function")
        if self.reward == "format":
            check.that("pattern", _is_pattern(self.pattern), "a regular expression")
        else:
            check.that("pattern", self.pattern is None, "null, as only reward=format has one")
        if self.reward == "length":
            check.integer("free_tokens", at_least=0)
            check.integer("max_tokens", at_least=(self.free_tokens or 0) + 1)
        else:
            for field in ("free_tokens", "max_tokens"):
                check.that(field, getattr(self, field) is None, "null, as only reward=length has it")

    def spec(self, config: RewardConfig) -> RewardSpec | None:
        """Return what processes compute for the term; None: it needs none."""
        if self.reward == "length":
            return None
        if self.reward == "format":
            return dataclasses.replace(config.spec, kind="format", target=self.pattern, label=f"the term {self.name!r}")
        return config.of(self.reward).spec


def length_term(tokens: int, free_tokens: int, max_tokens: int) -> float:
    """Return 0 up to ``free_tokens``, then a linear fall to -1 at ``max_tokens`` (soft overlong punishment: DAPO,
    arXiv 2503.14476, section 3.4)."""
    return -min(max((tokens - free_tokens) / (max_tokens - free_tokens), 0.0), 1.0)


@dataclass(frozen=True)
class Term:
    """A term of a job's reward. ``pool``: its processes; None: it needs none."""

    spec: TermSpec
    pool: RewardPool | None

    def outcomes(self, samples: Sequence[RewardSample], response_tokens: Sequence[int]) -> list[RewardOutcome]:
        """Return the term of each sample, without its weight."""
        if self.pool is not None:
            return self.pool.score(samples)
        free, longest = self.spec.free_tokens, self.spec.max_tokens
        assert self.spec.reward == "length" and free is not None and longest is not None
        return [RewardOutcome(length_term(tokens, free, longest)) for tokens in response_tokens]


def start_terms(config: RewardConfig, start: Callable[[RewardConfig, RewardSpec], RewardPool]) -> list[Term]:
    """Start the processes of `reward.terms`.
    ``start``: starts a pool, and sees to its end.
    Raise ValueError: a function cannot be loaded; names the term."""
    terms = []
    for index, term in enumerate(config.term_specs()):
        with _naming(index, term):
            spec = term.spec(config)
            terms.append(Term(term, None if spec is None else start(config, spec)))
    return terms


def check_term_fields(terms: Sequence[Term], everywhere: Collection[str]) -> None:
    """Check that every row has the fields that the terms require, ``everywhere``: those that every row has.
    Raise ValueError: names the term and the field."""
    for index, term in enumerate(terms):
        if term.pool is not None:
            with _naming(index, term.spec):
                term.pool.check_fields(everywhere)


def pools_of(rule: RewardPool | None, terms: Sequence[Term]) -> list[RewardPool]:
    """Return the pools of a reward (None: a reward model) and of its terms."""
    return [pool for pool in (rule, *(term.pool for term in terms)) if pool is not None]


def combine(parts: Mapping[str, tuple[float, Sequence[RewardOutcome]]]) -> list[RewardOutcome]:
    """Add up outcomes.
    ``parts``: weight and outcomes by name; all have as many."""
    names, weights = [*parts], [weight for weight, _ in parts.values()]
    return [_total(names, weights, outcomes) for outcomes in zip(*(of for _, of in parts.values()), strict=True)]


def _total(names: Sequence[str], weights: Sequence[float], outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    seconds, total, terms = sum(outcome.seconds for outcome in outcomes), 0.0, dict[str, float]()
    for name, weight, outcome in zip(names, weights, outcomes, strict=True):
        if outcome.reward is None:
            return RewardOutcome(None, outcome.error, f"the term {name!r}: {outcome.detail}", seconds)
        total += weight * outcome.reward
        terms[name] = outcome.reward
    if not usable(total):
        return RewardOutcome(None, "bad_type", f"the weighted sum of {terms} is {total}, beyond float32", seconds)
    return RewardOutcome(total, seconds=seconds, terms=terms)


@contextmanager
def _naming(index: int, term: TermSpec) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"reward.terms[{index}] ({term.name}): {error}") from error


def _is_pattern(pattern: Any) -> bool:
    try:
        return isinstance(pattern, str) and bool(re.compile(pattern))
    except re.error:
        return False
