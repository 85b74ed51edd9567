"""Mathematical equality of answers, by the library math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging

FINAL = "####"
"""GSM8K writes the final answer behind this mark."""


def math_answer(prompt: str, response: str, answer: str, **fields: object) -> float:
    """1.0 where the answer found in `response` equals `answer` as mathematics, else 0.0 (also where none is found).

    Behind a `####`, in the answer or in the response, only what follows the last one counts; otherwise math-verify
    looks for `\\boxed{…}`, formulas and numbers. Its own time limits are off (they turn an overrun into a wrong answer,
    and need the main thread's alarm): the guard around this process limits the time.

    Raises:
        ValueError: `answer` holds nothing that can be parsed.
        Exception: whatever math-verify raises while parsing or comparing; that sample is then not scored.
    """
    from math_verify import parse, verify

    # With its time limits off the library warns once per process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = _parse_gold(answer, parse)
    found = parse(_final(response), parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _final(text: str) -> str:
    return text.rsplit(FINAL, 1)[-1].strip()


def _parse_gold(answer: str, parse) -> list:
    text = _final(answer)
    # Bare LaTeX such as (1,2) or x+1 is only seen as a whole inside a formula.
    formula = text if "$" in text or "\\boxed" in text else f"${text}$"
    gold = parse(formula, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the reference answer {answer!r} holds no mathematical expression")
    return gold
