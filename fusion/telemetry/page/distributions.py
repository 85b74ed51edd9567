"""Count the staleness of trained groups, the lengths of their responses, and how all groups ended. Pure.

Invariants:
1. Percentiles and shares are exact, whatever the number of responses; the memory grows with the number of different
   lengths only.
2. The bins of a histogram are of one width, cover every length, and their counts add up to the number of responses."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from fusion.telemetry.page.curves import number

MAX_BINS = 48
"""Maximum number of bins of the histogram of lengths."""
WINDOW_SHARE = 10
"""Number of equal parts of the steps, of which the first and the last count as their start and end"""
PERCENTILES = (50, 90, 99)

TAIL_SHARE = 0.1
"""Share of the responses, the longest ones, whose share of all tokens is stated"""


class Distributions:
    """Count groups one by one. ``num_steps``: of the run so far, to find its first and last steps."""

    def __init__(self, num_steps: int) -> None:
        window = max(1, num_steps // WINDOW_SHARE)
        self._early, self._late = window, num_steps - window
        self._ended: Counter[str] = Counter()
        self._lags: Counter[int] = Counter()
        self._lengths: dict[str, Counter[int]] = {"all": Counter(), "first": Counter(), "last": Counter()}

    def add(self, group: Mapping[str, Any]) -> None:
        """Count a row of groups.jsonl; values of an unexpected type are ignored."""
        self._ended[str(group.get("ended"))] += 1
        if isinstance(lag := group.get("lag"), int):
            self._lags[lag] += 1
        tokens = group.get("response_tokens")
        if not isinstance(tokens, list):
            return
        step = number(group.get("step")) or 0
        lengths = [length for length in tokens if isinstance(length, int) and length >= 0]
        self._lengths["all"].update(lengths)
        if step <= self._early:
            self._lengths["first"].update(lengths)
        if step > self._late:
            self._lengths["last"].update(lengths)

    def staleness(self) -> dict[str, Any] | None:
        """Return `lag` (policy versions) and `groups` (their numbers); None without any."""
        if not self._lags:
            return None
        lags = range(min(self._lags), max(self._lags) + 1) if max(self._lags) < 1000 else sorted(self._lags)
        return {"lag": list(lags), "groups": [self._lags[lag] for lag in lags]}

    def ended(self) -> dict[str, int]:
        """Return the number of groups by how they ended, the most frequent first."""
        return dict(self._ended.most_common())

    def lengths(self) -> dict[str, Any] | None:
        """Return the histogram: `from` (smallest length of each bin) and `width`, in tokens, and counts by bin of
        `all`, `first` and `last` steps; and `summary` of each of them. None without responses."""
        everything = self._lengths["all"]
        if not everything:
            return None
        width = bin_width(min(everything), max(everything))
        first_bin, last_bin = min(everything) // width, max(everything) // width
        bins = range(first_bin, last_bin + 1)
        histogram: dict[str, Any] = {"from": [index * width for index in bins], "width": width}
        for name, counted in self._lengths.items():
            by_bin: Counter[int] = Counter()
            for length, count in counted.items():
                by_bin[length // width] += count
            histogram[name] = [by_bin[index] for index in bins]
        return histogram | {"summary": {name: summary(counted) for name, counted in self._lengths.items() if counted}}


def bin_width(shortest: int, longest: int) -> int:
    """Return the smallest width of the series 1, 2, 5, 10, … with at most `MAX_BINS` bins."""
    scale = 1
    while True:
        for width in (scale, 2 * scale, 5 * scale):
            if longest // width - shortest // width < MAX_BINS:
                return width
        scale *= 10


def summary(counted: Mapping[int, int]) -> dict[str, float]:
    """Return `responses`, `mean`, percentiles (`p50`, …), `max`, and `tail_share`: the share of all tokens that the
    longest tenth of the responses hold."""
    num, tokens = sum(counted.values()), sum(length * count for length, count in counted.items())
    figures: dict[str, float] = {"responses": num, "mean": tokens / num}
    lengths = sorted(counted)
    reached = list(accumulate(counted[length] for length in lengths))
    for percent in PERCENTILES:  # the smallest length that at least so many of the responses do not exceed
        figures[f"p{percent}"] = lengths[bisect_left(reached, -(-percent * num // 100))]
    in_tail = max(1, round(num * TAIL_SHARE))
    held, left = 0, in_tail
    for length in reversed(lengths):
        taken = min(left, counted[length])
        held, left = held + taken * length, left - taken
        if not left:
            break
    return figures | {"max": max(counted), "tail_share": held / tokens if tokens else 0.0}
