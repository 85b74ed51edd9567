"""Choose the samples that a report shows: those of the first and of the last step, the best and the worst. Pure.

Invariants:
1. At most `PER_KIND` of each kind; the memory does not grow with the number of samples.
2. No sample of the run has a higher reward than the best, or a lower one than the worst; of equal ones the latest is
   chosen. A sample without a reward is neither.
3. A text longer than `MAX_CHARACTERS`, or a message longer than its share of `MAX_CONVERSATION`, keeps its start and
   its end, and states how much is left out."""

import heapq
from collections.abc import Mapping
from typing import Any

from fusion.telemetry.page.curves import number
from fusion.telemetry.shortening import shortened

PER_KIND = 4
MAX_CHARACTERS = 6000
MAX_CONVERSATION, MAX_MESSAGES = 24000, 64
"""Characters of all messages of a conversation, and number of messages, of which the first and the last ones stay"""
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
            "prompt": shortened(sample.get("prompt"), MAX_CHARACTERS),
            "response": shortened(sample.get("response"), MAX_CHARACTERS),
        }
        if sample.get("answer"):
            row["answer"] = shortened(sample["answer"], MAX_CHARACTERS)
        if isinstance(messages := sample.get("messages"), list):
            row["messages"] = _shortened_messages(messages, sample.get("branches"))
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


def _shortened_messages(messages: list[Any], begins: Any) -> list[dict[str, Any]]:
    """Return role and content of each message, and `branch` where another branch ``begins`` behind so many."""
    shown, half = [*enumerate(messages)], MAX_MESSAGES // 2
    if (left_out := len(messages) - MAX_MESSAGES) > 0:
        note = {"role": "", "content": f"… {left_out:,} messages left out …"}
        shown = [*shown[:half], (-1, note), *shown[-half:]]
    limit = min(MAX_CHARACTERS, MAX_CONVERSATION // max(1, len(shown)))
    return [
        {name: shortened(message.get(name, ""), limit) for name in ("role", "content")}
        | ({"branch": True} if isinstance(begins, list) and place in begins else {})
        for place, message in shown
        if isinstance(message, Mapping)
    ]


def _keep(heap: list[_Ranked], entry: _Ranked) -> None:
    if len(heap) < PER_KIND:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)
