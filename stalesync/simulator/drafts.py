"""Decide how many drafted tokens a simulated engine verifies, and how many it keeps, in expectation. Pure.

    finished siblings, history ─► acceptance of a token, a ─► tokens a step: 1 + a + … + a^γ = (1 - a^(γ+1)) / (1 - a)
    EngineCost                 ─► seconds of a step, T(γ)  ─► γ* = argmin T(γ) / tokens a step, at most `MAX_DRAFTED`

This is the marginal-benefit rule of Seer (arXiv 2511.14617, section 3.4) for a whole rank: the budget object of a run
(`fusion/rollout/drafts/budget.py`) weighs single tokens of single drafts, which expectations do not have. Published
acceptance, an input, is constant along a draft; that of recorded texts is measured (`draft_texts.py`). Every draft
costs what one of γ tokens does, as where it is padded to that. Not modelled: the time to look drafts up, and its
variance. `DraftGroups` tracks how many siblings of each sequence of an engine have finished.

Invariant (property-tested): no other number of tokens promises more tokens a second; 0 is among the choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from fusion.costmodel.pace import EngineCost
from fusion.inference.config import DraftsConfig

if TYPE_CHECKING:
    from stalesync.simulator.sequence import SimulatedSequence

PUBLISHED_ACCEPTANCE = "drafts: acceptance is an input, as published (Seer, RhymeRL); simulate.py measures it on texts="
"""Note of a simulation without recorded texts"""
MAX_DRAFTED = 8
"""Tokens of a draft at most: Seer's maximum"""
KEPT_BY_SIBLINGS = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}
"""Finished siblings, at least → mean tokens a step of a draft of `MAX_DRAFTED`, the sampled one included: Seer, drafts
of a single path"""
HISTORY_ACCEPTANCE = 0.65
"""Share of the tokens drafted from a prompt's last group: RhymeRL (arXiv 2508.18588), the lower end of 65 to 79 %"""


@dataclass(frozen=True)
class DraftSpec:
    """Where drafts come from. ``siblings``: the group's other responses; ``history``: the row's last epoch; ``kept``:
    finished siblings, at least → tokens a step with drafts of 0, 1, … tokens (`draft_texts.py`), None: as published."""

    siblings: bool = True
    history: bool = False
    kept: Mapping[int, Sequence[float]] | None = None

    @classmethod
    def of(cls, config: DraftsConfig) -> DraftSpec | None:
        """Return the drafts of a config with the published acceptance; None: there are none."""
        return None if not config.is_on else cls(config.from_siblings, config.from_history)

    def track(self, finished_siblings: int) -> int:
        """Return the track of a sequence: the largest known number of finished siblings that it has at least."""
        return max(number for number in self._kept if number <= finished_siblings) if self.siblings else 0

    def tokens_per_step(self, track: int, drafted: int) -> float:
        """Return the tokens that a sequence gains in a step on average."""
        return self._kept[track][drafted]

    def __str__(self) -> str:
        means = ", ".join(f"{kept[-1]:.2f} ({track})" for track, kept in self._kept.items())
        origin = "as published" if self.kept is None else "measured on texts"
        return f"{origin}, tokens a step of whole drafts by finished siblings: {means}"

    def choose(self, cost: EngineCost, num_by_track: Mapping[int, int], contexts: float) -> int:
        """Return the number of drafted tokens that bring the most tokens a second; of several the lowest.
        ``num_by_track``: sequences that decode; ``contexts``: sum of their contexts."""
        decoding = sum(num_by_track.values())

        def seconds_per_token(drafted: int) -> float:
            tokens = sum(num * self.tokens_per_step(track, drafted) for track, num in num_by_track.items())
            return max(fixed + slope * contexts for fixed, slope in cost.decode_lines(decoding, drafted)) / tokens

        return min(range(MAX_DRAFTED + 1), key=seconds_per_token) if decoding else 0

    @cached_property
    def _kept(self) -> Mapping[int, Sequence[float]]:
        if self.kept is not None:
            return self.kept
        least = HISTORY_ACCEPTANCE if self.history else 0.0
        published = {track: _acceptance_of(kept) * self.siblings for track, kept in KEPT_BY_SIBLINGS.items()}
        return {
            track: list(accumulate(max(least, acceptance) ** depth for depth in range(MAX_DRAFTED + 1)))
            for track, acceptance in published.items()
        }


def _acceptance_of(kept: float) -> float:
    """Return the acceptance at which a draft of `MAX_DRAFTED` tokens yields ``kept`` tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        yields = sum(middle**depth for depth in range(MAX_DRAFTED + 1))
        low, high = (middle, high) if yields < kept else (low, middle)
    return low


class DraftGroups:
    """The sequences of an engine by group, where there are drafts: what each drafts from."""

    def __init__(self, drafts: DraftSpec | None) -> None:
        self._drafts = drafts
        self._finished: dict[str, int] = {}
        """Group → number of its finished responses, on any engine"""
        self._sequences: dict[str, dict[SimulatedSequence, None]] = {}

    def clear(self) -> None:
        """Remove all sequences: the engine starts."""
        self._sequences.clear()

    def finish(self, group: str, num_finished: int) -> bool:
        """Record the number of finished responses of a group; return whether sequences here may draft from them."""
        if self._drafts is not None:
            self._finished[group] = num_finished
        return group in self._sequences

    def join(self, seq: SimulatedSequence) -> None:
        """Add a sequence, on the track of what it drafts from."""
        if self._drafts is not None:
            group = seq.request.group
            seq.track = self._drafts.track(self._finished.get(group, 0))
            self._sequences.setdefault(group, {})[seq] = None

    def leave(self, seq: SimulatedSequence) -> None:
        if self._drafts is not None:
            members = self._sequences[seq.request.group]
            del members[seq]
            if not members:
                del self._sequences[seq.request.group]

    def moves(self, groups: Iterable[str]) -> Iterator[tuple[SimulatedSequence, int]]:
        """Yield the decoding sequences of groups whose track has changed, each with its new one; the tracks of others
        are set."""
        if self._drafts is None:
            return
        for group in groups:
            for seq in self._sequences.get(group, ()):
                track = self._drafts.track(self._finished.get(group, 0))
                if seq.decoding and seq.track != track:
                    yield seq, track
                elif not seq.decoding:
                    seq.track = track
