"""Match the format of a response: the rule of a term `format` (`reward.terms`)."""

import re
from collections.abc import Callable


def format_rule(pattern: str) -> Callable[[str, str, str], float]:
    """Return a reward that is 1 if the pattern matches the whole response, else 0. A dot matches line ends, too."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(prompt: str, response: str, answer: str) -> float:
        return float(compiled.fullmatch(response) is not None)

    return score
