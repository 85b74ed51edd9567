"""Score a generated arithmetic problem by exact match of its answer."""

from fusion.rewards.answers import is_damaged

MARKER = "#"


def arithmetic(prompt: str, response: str, answer: str, **fields: object) -> float:
    """Return 1.0 where `response` (without special tokens) ends with the correct answer, else 0.0.

    An answer without the marker `#` must be the whole response. An answer that starts with it (`#0b4a6`, written after
    the working) must end the response, which may contain only that one marker, so that several guesses earn nothing. A
    response whose text is damaged is wrong, and every response where the answer is empty."""
    if is_damaged(response):
        return 0.0
    response, answer = response.strip(), answer.strip()
    if not answer.startswith(MARKER):
        return float(response == answer != "")
    return float(response.endswith(answer) and response.count(MARKER) == 1)
