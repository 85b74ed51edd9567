"""The phases of a card as a table of allowed transitions, and what may be asked of it in each.

    EMPTY ──load──► TRAIN ──switch──► INFER
                      ▲─────switch──────┘

Invariants: a card is in exactly one phase; a transition that is not in the table, and a request that the phase does not
serve, is refused with the phase and the request; a card whose switch broke off is in BROKEN and serves nothing.
"""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    EMPTY = "empty"
    TRAIN = "train"
    INFER = "infer"
    BROKEN = "broken"


TRANSITIONS = {
    Phase.EMPTY: {Phase.TRAIN},
    Phase.TRAIN: {Phase.INFER},
    Phase.INFER: {Phase.TRAIN},
    Phase.BROKEN: set(),
}

SERVES = {
    "generate": {Phase.INFER},
    "reference": {Phase.TRAIN},
    "train": {Phase.TRAIN},
    "save": {Phase.TRAIN},
}


class PhaseError(RuntimeError):
    """A transition or a request that the phase of the card does not allow."""


class PhaseMachine:
    def __init__(self, rank: int):
        self.rank, self.phase = rank, Phase.EMPTY

    def begin(self, target: Phase) -> None:
        """Leaves the present phase; until `arrive` the card is BROKEN, so a switch that raises leaves it idle."""
        if target not in TRANSITIONS[self.phase]:
            allowed = sorted(phase.value for phase in TRANSITIONS[self.phase])
            raise PhaseError(
                f"rank {self.rank} is in phase {self.phase.value} and was asked to switch to {target.value}; "
                f"from here it can go to {allowed or 'nowhere'}"
            )
        self.phase = Phase.BROKEN

    def arrive(self, target: Phase) -> None:
        self.phase = target

    def require(self, request: str) -> None:
        if self.phase not in SERVES[request]:
            serving = sorted(phase.value for phase in SERVES[request])
            raise PhaseError(
                f"rank {self.rank} is in phase {self.phase.value} and was asked to {request}, which needs {serving}"
            )
