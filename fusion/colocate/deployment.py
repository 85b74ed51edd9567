"""Assign roles to cards. Pure data: no device, no process.

    separate     train │ train │ generate │ generate        weights are sent from one side to the other
    colocated    train and generate, on every card          weights change their layout in place
    full         train, generate, reference, reward model   on every card
    hybrid       train and generate │ generate              more cards generate than train

Reference and reward model have separate cards if `fusion.score_cards` > 0. Otherwise they share the cards that train:
their weights are kept on the host and loaded into HBM when they are needed.

Invariants (property-tested in tests/colocate/test_deployment.py):
1. Every card hosts a role, and every role that the run needs has a card.
2. A role's cards have consecutive ranks. In order: cards that train, cards that only generate, cards that only score.
3. No engine mixes cards that train and cards that do not."""

from dataclasses import dataclass
from enum import Enum

from fusion.colocate.config import OWN_CARDS, FusionConfig
from fusion.telemetry.keys import as_yaml


class Role(str, Enum):
    ACTOR_TRAIN = "actor_train"
    ACTOR_GENERATION = "actor_generation"
    REFERENCE = "reference"
    REWARD_MODEL = "reward_model"


@dataclass(frozen=True)
class Deployment:
    """The global ranks that host each role; () where the run does not use it."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    reference: tuple[int, ...] = ()
    reward_model: tuple[int, ...] = ()
    name: str = "colocated"

    @classmethod
    def colocated(cls, world: int) -> "Deployment":
        """Return training and generation on every one of ``world`` cards."""
        return cls(tuple(range(world)), tuple(range(world)))

    @property
    def world(self) -> int:
        return 1 + max(*self.train, *self.generate, *self.reference, *self.reward_model)

    @property
    def shared(self) -> tuple[int, ...]:
        """Cards that train and generate."""
        train = {*self.train}
        return tuple(rank for rank in self.generate if rank in train)

    @property
    def actor(self) -> tuple[int, ...]:
        """Cards that hold the actor in either layout: those that participate in a switch."""
        return tuple(sorted({*self.train, *self.generate}))

    def cards_of(self, role: Role) -> tuple[int, ...]:
        return {
            Role.ACTOR_TRAIN: self.train,
            Role.ACTOR_GENERATION: self.generate,
            Role.REFERENCE: self.reference,
            Role.REWARD_MODEL: self.reward_model,
        }[role]

    def roles_of(self, rank: int) -> frozenset[Role]:
        return frozenset(role for role in Role if rank in self.cards_of(role))

    def engines(self, size: int) -> list[tuple[int, ...]]:
        """Return the ranks of every engine of ``size`` cards. Raise ValueError if an engine would be incomplete, or mix
        cards that train and cards that do not; names the keys."""
        alone = len(self.generate) - len(self.shared)
        for count, what in ((len(self.shared), "cards that train and generate"), (alone, "cards that only generate")):
            if count % size:
                raise ValueError(
                    f"parallel.infer: an engine takes {size} cards, which does not divide the {count} {what} "
                    f"(fusion.deployment={self.name}, fusion.infer_cards={alone})"
                )
        return [self.generate[first : first + size] for first in range(0, len(self.generate), size)]

    def describe(self) -> str:
        """Return the cards of each role in a line: `actor_train 0-3, reference 0-3`."""
        spans = [(role.value, self.cards_of(role)) for role in Role if self.cards_of(role)]
        return ", ".join(f"{role} {cards[0]}{f'-{cards[-1]}' if len(cards) > 1 else ''}" for role, cards in spans)


def deploy(config: FusionConfig, npus: int, reference: bool, reward_model: bool) -> Deployment:
    """Return the deployment configured by the group `fusion`. ``npus``: cards of the run (`cluster.npus`);
    ``reference``, ``reward_model``: whether the run needs the role. Raise ValueError if there are too few cards, or
    none of them would have a role; names the key."""
    name, score = config.deployment, config.score_cards
    has_infer_cards = name in OWN_CARDS
    if score and not (reference or reward_model):
        raise ValueError(
            f"fusion.score_cards={score}: nothing would run on them, as algorithm.kl_coef is 0 and reward.model null"
        )
    actor = npus - score
    infer = 0 if not has_infer_cards else actor // 2 if config.infer_cards is None else config.infer_cards
    if actor - infer < 1 or (has_infer_cards and infer < 1):
        keys = f"fusion.infer_cards={as_yaml(config.infer_cards)} and fusion.score_cards={score}"
        raise ValueError(
            f"fusion.deployment={name} on cluster.npus={npus} with {keys}: expected at least one card that trains"
            + (" and one that only generates" if has_infer_cards else "")
        )
    train = tuple(range(actor - infer))
    generate = tuple(range(len(train) if name == "separate" else 0, actor))
    scoring = tuple(range(actor, npus)) or train
    return Deployment(
        train=train,
        generate=generate,
        reference=scoring if reference else (),
        reward_model=scoring if reward_model else (),
        name=name,
    )
