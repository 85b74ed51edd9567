"""Choose the samples that a report shows: those of the first and of the last step, the best and the worst. Pure.

Invariants:
1. At most `PER_KIND` of each kind; the memory does not grow with the number of samples.
2. No sample of the run has a higher reward than the best, or a lower one than the worst; of equal ones the latest is
   chosen. A sample without a reward is neither.
3. A text longer than `MAX_CHARACTERS` keeps its start and its end, and states how much is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from fusion.telemetry.page.curves import number

PER_KIND = 4
MAX_CHARACTERS = 6000

_Ranked = tuple[float, int, dict[str, Any]]


class Examples:
    """Choose among the rows of samples.jsonl, added one by one in their order."""

    def __init__(self) -> None:
        self._first: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._best: list[_Ranked] = []
        self._worst: list[_Ranked] = []
        self._num_added = 0

    def add(self, sample: Mapping[str, Any]) -> None:
        """Consider a sample; its texts are shortened."""
        reward = number(sample.get("reward"))
        row: dict[str, Any] = {
            "step": number(sample.get("step")),
            "reward": reward,
            "prompt": shortened(sample.get("prompt")),
            "response": shortened(sample.get("response")),
        }
        if sample.get("answer"):
            row["answer"] = shortened(sample["answer"])
        if isinstance(messages := sample.get("messages"), list):
            row["messages"] = [_shortened_message(message) for message in messages if isinstance(message, Mapping)]
        self._num_added += 1
        if not self._first or (row["step"] == self._first[0]["step"] and len(self._first) < PER_KIND):
            self._first.append(row)
        if self._last and self._last[0]["step"] != row["step"]:
            self._last = []
        if len(self._last) < PER_KIND:
            self._last.append(row)
        if reward is not None:
            _keep(self._best, (reward, self._num_added, row))
            _keep(self._worst, (-reward, self._num_added, row))

    def result(self) -> dict[str, list[dict[str, Any]]]:
        """Return `before`, `now`, `best` and `worst`: step, reward, prompt and response of each, the reference answer
        where there is one, and of conversations the messages."""
        best, worst = ([row for *_, row in sorted(heap, reverse=True)] for heap in (self._best, self._worst))
        return {"before": self._first, "now": self._last, "best": best, "worst": worst}


def shortened(text: Any, limit: int = MAX_CHARACTERS) -> str:
    """Return a text of at most about ``limit`` characters; anything else by its own text."""
    text = text if isinstance(text, str) else str(text)
    if len(text) <= limit:
        return text
    start, end = limit // 3, limit - limit // 3
    return f"{text[:start]}\n… {len(text) - start - end:,} characters left out …\n{text[-end:]}"


def _shortened_message(message: Mapping[str, Any]) -> dict[str, str]:
    return {name: shortened(message.get(name, "")) for name in ("role", "content")}


def _keep(heap: list[_Ranked], entry: _Ranked) -> None:
    if len(heap) < PER_KIND:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)
