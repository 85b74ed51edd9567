"""Track what the sequences of an engine draft from: how many responses of their group have finished. Pure."""

from collections.abc import Iterable, Iterator

from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.sequence import SimulatedSequence


class DraftGroups:
    """The sequences of an engine by group, where there are drafts."""

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
