"""Compare answers as text, and check before a run that its rewards return scores, and can match the reference answers.

Invariants (tests/rewards/test_answers.py): a damaged text matches nothing; text equality is symmetric, and ignores
case, space, `\\text{…}`, `$`, a final period, and around the whole `**` and the brackets of letters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.rewards.outcome import RewardSample

if TYPE_CHECKING:
    from fusion.rewards.guard import RewardPool

FINAL = "####"
"""GSM8K writes the final answer after this marker."""
BOX = "\\boxed{"
EXPECTED = {
    "math": "expected a number, an expression or a text that is right when it is written in \\boxed{…}",
    "arithmetic": "expected a text that a response can equal, or one that starts with its only #",
}
"""Expectation of each rule of a reference answer"""
NAMES = {"infinity"}
"""Words that are mathematics"""
SHOWN_ROWS, SHOWN_CHARS = 3, 60

_DAMAGED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd-\uffff\ud800-\udfff]")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_BRACKETED = re.compile(r"[(\[]([^\W\d_]+)[)\]]")
_WORD = re.compile(r"[^\W\d_]{4}")


def is_damaged(text: str) -> bool:
    """Return whether a text has characters of invalid output: U+FFFD, lone surrogates, control characters."""
    return _DAMAGED.search(text) is not None


def final_part(text: str) -> str:
    """Return what follows the last `####`, or the whole text."""
    return text.rsplit(FINAL, 1)[-1].strip()


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`; None if there is none."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, start = 1, start + len(BOX)
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end]
    return None


def equal_as_text(response: str, answer: str) -> bool:
    """Return whether the answer in a response is the same text as a reference answer that has one."""
    return bool(wanted := normalized(answer)) and normalized(response) == wanted


def normalized(text: str) -> str:
    """Return the answer in a text, in the form in which texts are compared."""
    final = final_part(text)
    answer = unicodedata.normalize("NFC", final if (content := boxed(final)) is None else content)
    answer = " ".join(_WRAPPED.sub(r"\1", answer).replace("$", "").strip("*").split()).rstrip(". ").strip("*")
    return _BRACKETED.sub(r"\1", answer).casefold() if _BRACKETED.fullmatch(answer) else answer.casefold()


def is_prose(answer: str) -> bool:
    """Return whether an answer can only be compared as text: a single letter, or words without a digit, an operator or
    a command of LaTeX. A parser of formulas reads words as products of their letters."""
    text = normalized(answer)
    words = _WORD.search(text) is not None and not re.search(r"[\d\\^_=+<>{}]", text) and text not in NAMES
    return words or len(text) == 1 and text.isalpha()


@dataclass(frozen=True)
class ReferenceAnswer:
    """A reference answer of a data row; ``row``: its name in messages."""

    row: str
    text: str


def expected_response(rule: str, answer: str) -> str | None:
    """Return a response that a built-in rule should score as right; None if there can be none."""
    final = final_part(answer)
    if is_damaged(answer) or rule == "math" and not final:
        return None
    return answer if rule != "math" or BOX in final else f"{BOX}{final.strip('$')}}}"


def unmatched(pool: RewardPool, answers: Sequence[ReferenceAnswer]) -> list[ReferenceAnswer]:
    """Score each reference answer as a right response against itself; return those that are not right."""
    responses = [(answer, expected_response(pool.kind, answer.text)) for answer in answers]
    scorable = [(answer, text) for answer, text in responses if text is not None]
    outcomes = pool.score([RewardSample("", text, answer.text) for answer, text in scorable])
    right = {answer for (answer, _), outcome in zip(scorable, outcomes, strict=True) if outcome.reward == 1.0}
    return [answer for answer in answers if answer not in right]


def check_answers(pools: Iterable[RewardPool], answers: Sequence[ReferenceAnswer]) -> list[str]:
    """Check that the built-in rules among rewards can match reference answers; return warnings. The others are never
    asked.
    Raise ValueError: one can match none of them; names rows, values, and what is expected."""
    return [line for pool in pools if pool.kind in EXPECTED for line in _check_rule(pool, answers)]


def call_once(pool: RewardPool, sample: RewardSample, *, group_size: int, key: str = "") -> str:
    """Call a reward once, with the reference answer of ``sample`` as every response of a group; return a line that
    describes it. The pool logs a failure as a warning: a judge may be down for a moment, and an answer need not be a
    response.
    ``key``: names the reward in an error.
    Raise ValueError: the reward has returned something that is no reward."""
    response = expected_response(pool.kind, sample.answer) or sample.answer
    (outcome,) = pool.score([replace(sample, response=response, others=[response] * (group_size - 1))])
    called = f"{pool.kind} of {response[-SHOWN_CHARS:]!r}, where the answer is {sample.answer[-SHOWN_CHARS:]!r}"
    if outcome.error == "bad_type":
        raise ValueError(f"{key}{pool.label}: {called}: it {outcome.detail}")
    result = f"{outcome.reward:g}" if outcome.reward is not None else f"failed ({outcome.error})"
    return f"{called}: {result} in {outcome.seconds:.3f} s"


def _check_rule(pool: RewardPool, answers: Sequence[ReferenceAnswer]) -> list[str]:
    rule = pool.kind
    wrong = unmatched(pool, answers)
    lines = []
    if wrong:
        text = (
            f"the reward {rule} can never match {len(wrong)} of {len(answers)} reference answers, as they do not match "
            f"themselves: {_shown(wrong)}; {EXPECTED[rule]}"
        )
        if len(wrong) == len(answers):
            raise ValueError(f"{text}. Correct the answers, or name another data.answer_field or reward")
        lines.append(f"{text}; responses to such a row are all wrong")
    if rule == "math" and (prose := [answer for answer in answers if answer not in wrong and is_prose(answer.text)]):
        lines.append(
            f"the reward math compares {len(prose)} of {len(answers)} reference answers as text: {_shown(prose)}; "
            "a response is right if such a text is in its last \\boxed{…}, after #### or all of it"
        )
    return lines


def _shown(answers: Iterable[ReferenceAnswer]) -> str:
    texts = [f"{answer.row}: {answer.text[-SHOWN_CHARS:]!r}" for answer in answers]
    more = f" and {len(texts) - SHOWN_ROWS} more" if len(texts) > SHOWN_ROWS else ""
    return ", ".join(texts[:SHOWN_ROWS]) + more
