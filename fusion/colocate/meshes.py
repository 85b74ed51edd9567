"""Create the process groups of a card: one mesh for each role, and the groups that switch, read and save together."""

from dataclasses import dataclass

import torch.distributed as dist

from fusion.colocate.groups import add_mesh, plan_dispatch_groups, plan_groups, replicas
from fusion.colocate.rendezvous import new_group
from fusion.colocate.spec import WorkerSpec
from fusion.model import Mesh, Parallel


@dataclass
class Meshes:
    """The process groups of a card. A mesh is None if the card is not in it; a group is None if it has one member.
    ``actor``: the cards that take part in a switch to INFER. The only group that has cards of several engines, or of an
    engine and the trainer, in it, so the only one that must be renewed when an engine is replaced; ``trainers``: the
    cards that take part in a switch to TRAIN; ``replica``: the cards that train on the same samples;
    ``checkpoint_group``: the cards of ``trainers`` over the host, for saving in the background."""

    train: Mesh | None = None
    engine: Mesh | None = None
    reference: Mesh | None = None
    reward_model: Mesh | None = None
    actor: dist.ProcessGroup | None = None
    trainers: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, spec: WorkerSpec, rank: int, backend: str) -> "Meshes":
        """Create all groups, in one order on every card. Collective over the world. ``backend``: the `Device`'s."""
        deployment = spec.deployment
        made = {
            members: dist.new_group(list(members), backend=_backend(backend, host))
            for members, host in (plan_groups(spec) if spec.world > 1 else {}).items()
        }

        alone = {
            members: dist.new_group(list(members), backend=_backend(backend, False))
            for members in plan_dispatch_groups(spec)
        }

        def mesh(parallel: Parallel | None, ranks: tuple[int, ...], dispatches: bool = False) -> Mesh | None:
            if parallel is None or rank not in ranks:
                return None
            dispatch = (lambda members: alone[tuple(members)]) if dispatches else None
            return Mesh.create(parallel, ranks, lambda members: made[tuple(members)], dispatch)

        def group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            return made[ranks] if rank in ranks and len(ranks) > 1 else None

        train = mesh(spec.train, deployment.train)
        engines = [mesh(spec.infer_of_one_engine, ranks, dispatches=True) for ranks in spec.engines]
        reward, save = spec.reward_model, None
        if len(deployment.train) > 1:
            save = dist.new_group(list(deployment.train), backend="gloo")
        replica = next((members for members in replicas(spec) if rank in members), ())
        return cls(
            train=train,
            engine=next((engine for engine in engines if engine is not None), None),
            reference=mesh(spec.reference, deployment.reference),
            reward_model=mesh(reward.layout if reward else None, deployment.reward_model),
            actor=group(deployment.actor),
            trainers=group(deployment.train),
            replica=group(replica),
            checkpoint_group=save if rank in deployment.train else None,
        )

    @classmethod
    def create_restarted(cls, spec: WorkerSpec, rank: int, restart: int, backend: str) -> "Meshes":
        """Create the groups within the engine of ``rank``, whose cards have all restarted. Collective over the engine;
        `renew_actor` must follow. ``restart``: its number in the run, from 1; ``backend``: as of `create`."""
        ranks = next(ranks for ranks in spec.engines if rank in ranks)
        groups = add_mesh({}, spec.infer_of_one_engine, ranks)

        def create(members: list[int]) -> dist.ProcessGroup | None:
            chosen = _backend(backend, groups[tuple(members)])
            return new_group(members, f"restart {restart}: engine {members}", chosen)

        def create_dispatch(members: list[int]) -> dist.ProcessGroup | None:
            return new_group(members, f"restart {restart}: dispatch {members}", _backend(backend, False))

        return cls(engine=Mesh.create(spec.infer_of_one_engine, ranks, create, create_dispatch))

    def leave_actor(self) -> None:
        """Leave the group `actor` after a failure, so that no rank waits in it. `renew_actor` must follow."""
        if self.actor is not None:
            dist.destroy_process_group(self.actor)
            self.actor = None

    def renew_actor(self, spec: WorkerSpec, restart: int, backend: str) -> None:
        """Replace the group `actor`, of which a member has ended and was restarted. Collective over the actor's cards,
        of which no one is in a collective of the group."""
        self.leave_actor()
        self.actor = new_group(spec.deployment.actor, f"restart {restart}: actor", backend)


def _backend(backend: str, host: bool) -> str:
    """Return the backend of a group; without gloo if the host does not communicate in it."""
    return backend if host else backend.rpartition(",")[-1]
