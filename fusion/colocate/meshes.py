"""Create the process groups of a card: one mesh for each role, and the groups that switch, read and save together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fusion.colocate.rendezvous import new_group
from fusion.colocate.spec import WorkerSpec
from fusion.model import Mesh, Parallel


@dataclass
class Meshes:
    """The process groups of a card. A mesh is None if the card is not in it; a group is None if it has one member.

    Attributes:
        actor: the cards that take part in a switch to INFER. The only group that has cards of several engines, or of
            an engine and the trainer, in it; so the only one that must be renewed when an engine is replaced.
        trainers: the cards that take part in a switch to TRAIN.
        replica: the cards that train on the same samples.
        checkpoint_group: the cards of ``trainers`` over the host, for saving in the background.
    """

    train: Mesh | None = None
    engine: Mesh | None = None
    reference: Mesh | None = None
    reward_model: Mesh | None = None
    actor: dist.ProcessGroup | None = None
    trainers: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, spec: WorkerSpec, rank: int) -> Meshes:
        """Create all groups in the same order on every card. Collective over the whole world."""
        deployment = spec.deployment

        def mesh(parallel: Parallel | None, ranks: tuple[int, ...]) -> Mesh | None:
            made = Mesh.create(parallel, ranks) if parallel is not None and ranks else None
            return made if made is not None and made.rank >= 0 else None

        train = mesh(spec.train, deployment.train)
        engines = [mesh(spec.infer_of_one_engine, ranks) for ranks in spec.engines]
        reward = spec.reward_model
        return cls(
            train=train,
            engine=next((engine for engine in engines if engine is not None), None),
            reference=mesh(spec.reference, deployment.reference),
            reward_model=mesh(reward.layout if reward else None, deployment.reward_model),
            actor=group_of(deployment.actor, rank),
            trainers=group_of(deployment.train, rank),
            replica=_replicas(spec, rank) if spec.train.pp > 1 else train.tp_group if train else None,
            checkpoint_group=group_of(deployment.train, rank, "gloo"),
        )

    @classmethod
    def create_restarted(cls, spec: WorkerSpec, rank: int, restart: int, backend: str) -> Meshes:
        """Create the groups within the engine of ``rank``, whose cards have all restarted. Collective over the engine;
        `renew_actor` must follow.

        Args:
            restart: number of the restart in the run, from 1.
            backend: `Device.process_group_backend`.
        """
        ranks = next(ranks for ranks in spec.engines if rank in ranks)
        engine = Mesh.create(
            spec.infer_of_one_engine,
            ranks,
            lambda members: new_group(members, f"restart {restart}: engine {members}", backend),
        )
        return cls(engine=engine)

    def leave_actor(self) -> None:
        """Leave the group `actor`, in which a collective has failed, so that no other rank waits for this one in it.
        `renew_actor` must follow."""
        if self.actor is not None:
            dist.destroy_process_group(self.actor)
            self.actor = None

    def renew_actor(self, spec: WorkerSpec, restart: int, backend: str) -> None:
        """Replace the group `actor`, of which a member has ended and was restarted. Collective over the actor's cards,
        of which no one is in a collective of the group."""
        self.leave_actor()
        self.actor = new_group(spec.deployment.actor, f"restart {restart}: actor", backend)


def group_of(ranks: Sequence[int], rank: int, backend: str | None = None) -> dist.ProcessGroup | None:
    """Create the process group of ``ranks``; None if it has one member or ``rank`` is not in it. Collective over the
    world."""
    if len(ranks) == 1:
        return None
    group = dist.new_group(list(ranks), backend=backend)
    return group if rank in ranks else None


def _replicas(spec: WorkerSpec, rank: int) -> dist.ProcessGroup | None:
    """Group all TP ranks of all stages with the same DP coordinate, the first rank of the first stage in front."""
    members: dict[int, list[int]] = {}
    for place, card in enumerate(spec.deployment.train):
        members.setdefault(spec.train.coordinate("dp", place), []).append(card)
    groups = [group_of(cards, rank) for cards in members.values()]
    return next((group for group in groups if group is not None), None)
