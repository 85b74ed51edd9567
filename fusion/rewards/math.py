"""Compare answers as mathematics with the library math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from fusion.rewards.answers import equal_as_text, final_part, is_damaged, is_prose


def math_answer(prompt: str, response: str, answer: str, **fields: object) -> float:
    """Return 1.0 where the answer in `response` is mathematically equal to `answer`, else 0.0 (also where there is
    none).

    In an answer or a response with `####`, only the text after the last one counts; otherwise math-verify looks for
    `\\boxed{…}`, formulas and numbers. An answer that is prose is compared as text only, any other also as text
    (`answers.py`). A response whose text is damaged is wrong. Math-verify's own time limits are disabled (they turn a
    timeout into a wrong answer, and need the main thread's alarm): the pool of guarded processes limits the time.

    Raises:
        ValueError: `answer` is empty.
        Exception: math-verify failed to parse or compare; the sample is then not scored.
    """
    # With its time limits disabled, the library warns once per process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    predicted = final_part(response)
    if not final_part(answer):
        raise ValueError(f"the reference answer {answer!r} is empty")
    if is_damaged(predicted):
        return 0.0
    if equal_as_text(response, answer):
        return 1.0
    if is_prose(answer):
        return 0.0
    gold = _parse_gold(answer)
    parsed = parse(predicted, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, parsed, timeout_seconds=None, raise_on_error=True))


def _parse_gold(answer: str) -> list:
    """Parse a reference answer; return [] if it has nothing that can be parsed, which nothing equals as mathematics."""
    text = final_part(answer).replace("\\$", "")
    # Bare LaTeX such as (1,2) or x+1 is only parsed as a whole inside a formula.
    formula = text if "$" in text or "\\boxed" in text else f"${text}$"
    return parse(formula, parsing_timeout=None, raise_on_error=True)
