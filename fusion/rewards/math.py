"""Compare answers as mathematics with the library math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging

FINAL = "####"
"""GSM8K writes the final answer after this marker."""


def math_answer(prompt: str, response: str, answer: str, **fields: object) -> float:
    """Return 1.0 where the answer in `response` is mathematically equal to `answer`, else 0.0 (also where there is
    none).

    In an answer or a response with `####`, only the text after the last one counts; otherwise math-verify looks for
    `\\boxed{…}`, formulas and numbers. Its own time limits are disabled (they turn a timeout into a wrong answer, and
    need the main thread's alarm): the pool of guarded processes limits the time.

    Raises:
        ValueError: `answer` contains nothing that can be parsed.
        Exception: math-verify failed to parse or compare; the sample is then not scored.
    """
    from math_verify import parse, verify

    # With its time limits disabled, the library warns once per process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = _parse_gold(answer, parse)
    predicted = parse(_final(response), parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, predicted, timeout_seconds=None, raise_on_error=True))


def _final(text: str) -> str:
    return text.rsplit(FINAL, 1)[-1].strip()


def _parse_gold(answer: str, parse) -> list:
    text = _final(answer)
    # Bare LaTeX such as (1,2) or x+1 is only parsed as a whole inside a formula.
    formula = text if "$" in text or "\\boxed" in text else f"${text}$"
    gold = parse(formula, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the reference answer {answer!r} contains no mathematical expression")
    return gold
