"""Define the phases of a card, their transitions and the requests that each serves.

    cards that train                              other cards

    EMPTY ──load──► TRAIN ──switch──► INFER       EMPTY ──load──► STANDBY ──weights arrive──► INFER ─┐ newer weights
                    │ ▲ ▲◄───switch─────┘                          │ ▲ ▲◄──not in the share────┘ ▲───┘
           reference│ │ └─► STANDBY: other          reference,     │ │
        reward model▼ │     engines generate         reward model  ▼ │
              REFERENCE, REWARD                          REFERENCE, REWARD

Invariants: a card is in exactly one phase; a transition that is not in the table, or not allowed for the card's roles,
and a request that the phase does not serve, raise an error with the phase and the request; a card whose switch failed
is in BROKEN and serves nothing."""

from enum import Enum
from typing import NamedTuple

from fusion.colocate.deployment import Role


class Phase(str, Enum):
    EMPTY = "empty"
    TRAIN = "train"
    INFER = "infer"
    STANDBY = "standby"
    REFERENCE = "reference"
    REWARD = "reward"
    BROKEN = "broken"


class Transition(NamedTuple):
    """A transition that is allowed on cards with all roles in ``hosts`` and none in ``lacks``."""

    source: Phase
    target: Phase
    hosts: frozenset[Role]
    lacks: frozenset[Role] = frozenset()


_TRAIN, _GENERATE = frozenset({Role.ACTOR_TRAIN}), frozenset({Role.ACTOR_GENERATION})
_BOTH = _TRAIN | _GENERATE
_SCORE = {Phase.REFERENCE: frozenset({Role.REFERENCE}), Phase.REWARD: frozenset({Role.REWARD_MODEL})}

TRANSITIONS = (
    Transition(Phase.EMPTY, Phase.TRAIN, _TRAIN),
    Transition(Phase.EMPTY, Phase.STANDBY, frozenset(), lacks=_TRAIN),
    # In place: the card changes its layout, or goes to STANDBY while other engines generate.
    Transition(Phase.TRAIN, Phase.INFER, _BOTH),
    Transition(Phase.INFER, Phase.TRAIN, _BOTH),
    Transition(Phase.TRAIN, Phase.STANDBY, _BOTH),
    Transition(Phase.STANDBY, Phase.TRAIN, _BOTH),
    # To other cards: the trainer sends and keeps its weights, the engine receives them.
    Transition(Phase.TRAIN, Phase.TRAIN, _TRAIN),
    Transition(Phase.STANDBY, Phase.INFER, _GENERATE, lacks=_TRAIN),
    Transition(Phase.INFER, Phase.INFER, _GENERATE, lacks=_TRAIN),
    Transition(Phase.INFER, Phase.STANDBY, _GENERATE, lacks=_TRAIN),
    Transition(Phase.STANDBY, Phase.STANDBY, _GENERATE, lacks=_TRAIN),
    *(Transition(Phase.TRAIN, phase, _TRAIN | role) for phase, role in _SCORE.items()),
    *(Transition(phase, Phase.TRAIN, _TRAIN | role) for phase, role in _SCORE.items()),
    *(Transition(Phase.STANDBY, phase, role, lacks=_TRAIN) for phase, role in _SCORE.items()),
    *(Transition(phase, Phase.STANDBY, role, lacks=_TRAIN) for phase, role in _SCORE.items()),
)

SERVES = {
    "generate": {Phase.INFER},
    "reference": {Phase.REFERENCE},
    "score": {Phase.REWARD},
    "train": {Phase.TRAIN},
    "snapshot": {Phase.TRAIN},
    "restore": {Phase.TRAIN},
}


class PhaseError(RuntimeError):
    """Raised if the phase of the card does not allow a transition or a request."""


class PhaseMachine:
    def __init__(self, rank: int, roles: frozenset[Role]):
        self.rank, self.roles, self.phase = rank, roles, Phase.EMPTY

    @property
    def reachable(self) -> set[Phase]:
        """Phases that this card can switch to from its current one."""
        return {
            step.target
            for step in TRANSITIONS
            if step.source is self.phase and step.hosts <= self.roles and not step.lacks & self.roles
        }

    def check(self, target: Phase) -> None:
        """Raise the PhaseError that `begin` would raise."""
        if target not in self.reachable:
            allowed = sorted(phase.value for phase in self.reachable)
            raise PhaseError(
                f"rank {self.rank} ({self._roles()}) cannot switch from {self.phase.value} to {target.value}; "
                f"allowed: {allowed or 'none'}"
            )

    def begin(self, target: Phase) -> None:
        """Leave the current phase; the card is BROKEN until `arrive`, and stays so if the switch raises."""
        self.check(target)
        self.phase = Phase.BROKEN

    def arrive(self, target: Phase) -> None:
        """End the transition that `begin` started."""
        self.phase = target

    def require(self, request: str) -> None:
        """Raise a PhaseError if the current phase does not serve ``request``, a key of SERVES."""
        if self.phase not in SERVES[request]:
            serving = sorted(phase.value for phase in SERVES[request])
            raise PhaseError(
                f"rank {self.rank} ({self._roles()}) cannot {request} in phase {self.phase.value}; "
                f"allowed in: {serving}"
            )

    def _roles(self) -> str:
        return ", ".join(role.value for role in Role if role in self.roles)
