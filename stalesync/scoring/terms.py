"""Start the terms of a reward that has several (`reward.terms`), and compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fusion.rewards import (
    RewardConfig,
    RewardOutcome,
    RewardPool,
    RewardSample,
    RewardSpec,
    TermSpec,
    check_answers,
    check_required_fields,
    length_term,
)
from fusion.rewards.answers import expected_response
from stalesync.prompts import Prompt, PromptSource
from stalesync.scoring.samples import Sample

SHOWN_CHARS = 60


@dataclass(frozen=True)
class Term:
    """A further term of the reward. ``pool``: its processes; None: it needs none."""

    spec: TermSpec
    pool: RewardPool | None

    def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Return the term of each sample, without its weight."""
        if self.pool is not None:
            return score_text(self.pool, samples)
        free, longest = self.spec.free_tokens, self.spec.max_tokens
        assert self.spec.reward == "length" and free is not None and longest is not None
        return [RewardOutcome(length_term(sample.response_tokens, free, longest)) for sample in samples]


def start_terms(config: RewardConfig, start: Callable[[RewardConfig, RewardSpec], RewardPool]) -> list[Term]:
    """Start the processes of `reward.terms`.

    Args:
        start: starts a pool, and sees to its end.

    Raises:
        ValueError: a function cannot be loaded; names the term.
    """
    terms = []
    for index, spec in enumerate(config.term_specs()):
        try:
            wanted = spec.spec(config)
            terms.append(Term(spec, None if wanted is None else start(config, wanted)))
        except ValueError as error:
            raise ValueError(f"reward.terms[{index}] ({spec.name}): {error}") from error
    return terms


def check_term_fields(config: RewardConfig, terms: Sequence[Term], everywhere: Collection[str]) -> None:
    """Check that every row has the fields that the terms require, ``everywhere``: those that every row has.

    Raises:
        ValueError: names the term and the field.
    """
    for index, term in enumerate(terms):
        if term.pool is not None:
            try:
                check_required_fields(config.of(term.spec.reward), term.pool.required_fields, everywhere)
            except ValueError as error:
                raise ValueError(f"reward.terms[{index}] ({term.spec.name}): {error}") from error


def check_reference_answers(
    rule: RewardPool | None, terms: Sequence[Term], source: PromptSource, count: int = 64
) -> list[str]:
    """Check that the built-in rules among a reward and its terms can match ``count`` reference answers of the data;
    return warnings.

    Args:
        rule: processes of the reward itself; None: a reward model.

    Raises:
        ValueError: a rule can match none of them.
    """
    answers = source.reference_answers(count)
    pools = (rule, *(term.pool for term in terms))
    return [line for pool in pools if pool is not None for line in check_answers(pool, answers)]


def call_once(pool: RewardPool, prompt: Prompt, *, group_size: int, key: str = "") -> str:
    """Call a reward once, with the reference answer as every response of a group; return a line that describes it.
    The pool logs a failure as a warning: a judge may be down for a moment, and an answer need not be a response.

    Args:
        key: names the reward in an error.

    Raises:
        ValueError: the reward has returned something that is no reward.
    """
    response = expected_response(pool.kind, prompt.answer) or prompt.answer
    others = [response] * (group_size - 1)
    (outcome,) = pool.score([RewardSample(prompt.text, response, prompt.answer, prompt.fields, others, prompt.prefill)])
    called = f"{pool.kind} of {response[-SHOWN_CHARS:]!r}, where the answer is {prompt.answer[-SHOWN_CHARS:]!r}"
    if outcome.error == "bad_type":
        raise ValueError(f"{key}{pool.label}: {called}: it {outcome.detail}")
    result = f"{outcome.reward:g}" if outcome.reward is not None else f"failed ({outcome.error})"
    return f"{called}: {result} in {outcome.seconds:.3f} s"


def score_text(pool: RewardPool, samples: Sequence[Sample]) -> list[RewardOutcome]:
    """Score the text of samples in the processes of a pool."""
    asked = [(sample, sample.prompt) for sample in samples]
    return pool.score(
        [
            RewardSample(prompt.text, sample.response, prompt.answer, prompt.fields, sample.others, prompt.prefill)
            for sample, prompt in asked
        ]
    )
