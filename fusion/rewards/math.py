"""Compare answers as mathematics with the library math-verify (github.com/huggingface/Math-Verify)."""

import logging
import re
import sys

from math_verify import parse, verify

from fusion.rewards.answers import BOX, boxed, equal_as_text, final_part, is_damaged, is_prose

MAX_PARSED = 1 << 14
"""Characters of a response that math-verify reads: numbers separated by spaces take it a time quadratic in them"""
_CUT_WORD = re.compile(r"[!-~]*")
"""What may belong to a word that was cut: a number, or LaTeX"""


def math_answer(prompt: str, response: str, answer: str, **fields: object) -> float:
    """Return 1.0 where the answer in `response` is mathematically equal to `answer`, else 0.0 (also where there is
    none).

    In an answer or a response with `####`, only the text after the last one counts; otherwise math-verify looks for
    `\\boxed{…}`, formulas and numbers, in a long response only in its last `\\boxed{…}` or, without one, in the words
    of its last `MAX_PARSED` characters. An answer that is prose is compared as text only, any other also as text
    (`answers.py`). A response whose text is damaged is wrong. Math-verify's own time limits are disabled (they turn a
    timeout into a wrong answer, and need the main thread's alarm): the pool of guarded processes limits the time.
    Raise ValueError: `answer` is empty.
    Raise Exception: math-verify failed to parse or compare; the sample is then not scored."""
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
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_PARSED)  # a longer number would raise an error, instead of being another one
    try:
        gold = _parse_gold(answer)
        parsed = parse(_end_of(predicted), parsing_timeout=None, raise_on_error=True)
        return float(verify(gold, parsed, timeout_seconds=None, raise_on_error=True))
    finally:
        sys.set_int_max_str_digits(limit)


def _end_of(text: str) -> str:
    """Return the part of a response that is parsed, without a word that is cut: half a number is another number."""
    if len(text) <= MAX_PARSED:
        return text
    content = boxed(text)
    if content is not None and len(content) <= MAX_PARSED:
        return f"{BOX}{content}}}"
    return _CUT_WORD.sub("", text[-MAX_PARSED:], count=1)


def _parse_gold(answer: str) -> list:
    """Parse a reference answer; return [] if it has nothing that can be parsed, which nothing equals as mathematics."""
    text = final_part(answer).replace("\\$", "")
    # Bare LaTeX such as (1,2) or x+1 is only parsed as a whole inside a formula.
    formula = text if "$" in text or "\\boxed" in text else f"${text}$"
    return parse(formula, parsing_timeout=None, raise_on_error=True)
