"""Provide the prompts of a simulated run and the lengths of their responses: drawn, or read from a trace.

    DrawnLengths   names e0-0, e0-1, …; responses by `stalesync.prompts.lengths` with any spread; prompts of one length
    TraceLengths   JSON Lines with `group` and `response_tokens` (a list), as a run's groups.jsonl, in their order;
                   `prompt_tokens` where a line has it

Invariant: the n-th prompt and its responses depend on the seed, or the file, only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stalesync.prompts.lengths import ForcedLengths


@dataclass(frozen=True)
class SimulatedPrompt:
    """``response_tokens``: of each member of the group."""

    group: str
    prompt_tokens: int
    response_tokens: Sequence[int]

    @property
    def sample_tokens(self) -> list[int]:
        """Tokens of prompt and response of each member."""
        return [self.prompt_tokens + tokens for tokens in self.response_tokens]


class DrawnLengths:
    """Draw lengths. Names are as in a run, e<epoch>-<row>; ``rows``: of an epoch, None: it is endless."""

    def __init__(self, forced: ForcedLengths, group_size: int, prompt_tokens: int, rows: int | None = None) -> None:
        self._forced, self._members, self._prompt_tokens = forced, range(group_size), prompt_tokens
        self._rows, self._taken = rows, 0

    def next(self, count: int) -> list[SimulatedPrompt]:
        numbers = range(self._taken, self._taken + count)
        rows = self._rows or numbers.stop
        names = [f"e{number // rows}-{number % rows}" for number in numbers]
        self._taken += count
        lengths = self._forced.of_groups(names, self._members)
        return [SimulatedPrompt(name, self._prompt_tokens, own) for name, own in zip(names, lengths, strict=True)]


class TraceLengths:
    """Repeat the groups of a trace in order; from the second time on their names have a suffix."""

    def __init__(self, prompts: Sequence[SimulatedPrompt]) -> None:
        self.prompts = list(prompts)
        self._taken = 0

    @classmethod
    def read(cls, path: Path, *, prompt_tokens: int, max_response_tokens: int) -> "TraceLengths":
        """Read a trace. Lines without `response_tokens` (groups that were filtered or failed) are left out.
        ``prompt_tokens``: where a line does not state it; ``max_response_tokens``: bound of every response. Raise
        ValueError if the file cannot be read, a line is not as expected, or groups differ in size; with the line."""
        prompts: list[SimulatedPrompt] = []
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"trace={path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            prompt = _parse(line, f"trace={path}, line {number}", prompt_tokens, max_response_tokens)
            if prompt is not None:
                prompts.append(prompt)
                if len(prompt.response_tokens) != len(prompts[0].response_tokens):
                    sizes = len(prompts[0].response_tokens), len(prompt.response_tokens)
                    raise ValueError(f"trace={path}, line {number}: has {sizes[1]} responses, others {sizes[0]}")
        if not prompts:
            raise ValueError(f"trace={path}: no line has response_tokens, a list of the lengths of a group's responses")
        return cls(prompts)

    @property
    def group_size(self) -> int:
        return len(self.prompts[0].response_tokens)

    def next(self, count: int) -> list[SimulatedPrompt]:
        taken = []
        for number in range(self._taken, self._taken + count):
            round_, index = divmod(number, len(self.prompts))
            prompt = self.prompts[index]
            name = f"{prompt.group}~{round_}" if round_ else prompt.group
            taken.append(SimulatedPrompt(name, prompt.prompt_tokens, prompt.response_tokens))
        self._taken += count
        return taken


SimulatedLengths = DrawnLengths | TraceLengths
"""A source of prompts"""


def _parse(line: str, where: str, prompt_tokens: int, max_response_tokens: int) -> SimulatedPrompt | None:
    expected = "expected a JSON object with group and response_tokens, a list of whole numbers of at least 1"
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: {expected}") from None
    is_group = isinstance(row, dict) and isinstance(row.get("group"), str)
    if is_group and "response_tokens" not in row:
        return None
    lengths, prompt = (row["response_tokens"], row.get("prompt_tokens", prompt_tokens)) if is_group else ([], 0)
    numbers = [*lengths, prompt] if isinstance(lengths, list) else []
    if not lengths or not numbers or not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError(f"{where}: {expected}")
    return SimulatedPrompt(row["group"], prompt, [min(length, max_response_tokens) for length in lengths])
