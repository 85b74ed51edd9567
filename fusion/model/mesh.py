"""Create the process groups of one rank in a layout (`parallel.py` computes their members)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fusion.model.parallel import Axis, Parallel


def _coordinate(axis: Axis) -> Any:
    """Return the property of a rank's coordinate along an axis: an int."""
    return property(lambda mesh: mesh.parallel.coordinate(axis, mesh.rank))


@dataclass(frozen=True)
class Mesh:
    """Hold one rank's coordinates in a layout and its process groups; a group of one member is None.

    ``dispatch_group``: of `Parallel.dispatch_groups`. ``ends_group``: on the first and the last pipeline stage, this
    rank and the corresponding rank of the other end."""

    parallel: Parallel
    rank: int
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    edp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    dcp_group: dist.ProcessGroup | None = None
    ends_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None
    dispatch_group: dist.ProcessGroup | None = None

    tp_rank, cp_rank, dp_rank = _coordinate("tp"), _coordinate("cp"), _coordinate("dp")
    etp_rank, ep_rank, pp_rank, dcp_rank = _coordinate("etp"), _coordinate("ep"), _coordinate("pp"), _coordinate("dcp")

    @property
    def first_of_replica(self) -> bool:
        """Whether this is the first of the ranks of its stage that compute the same samples."""
        return self.tp_rank == 0 == self.cp_rank

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.parallel.pp - 1

    @classmethod
    def single(cls) -> "Mesh":
        """Return the mesh of a single process, without torch.distributed."""
        return cls(Parallel(), 0)

    @classmethod
    def create(
        cls,
        parallel: Parallel,
        ranks: tuple[int, ...] | None = None,
        new_group: Callable[[list[int]], Any] = dist.new_group,
        new_dispatch_group: Callable[[list[int]], Any] | None = None,
    ) -> "Mesh":
        """Create the mesh of the calling process over ``ranks`` (global ranks, in layout order; default: all).

        Collective over the whole world: every process must call it with the same arguments in the same order. A
        process outside ``ranks`` gets a mesh with rank -1. ``new_group`` may be one that concerns its members only;
        then only the processes of ``ranks`` call it. ``new_dispatch_group``: creates each of
        `Parallel.dispatch_groups`; None: there are none."""
        if not dist.is_initialized():
            assert parallel.world == 1
            return cls.single()
        ranks = ranks or tuple(range(parallel.world))
        assert len(ranks) == parallel.world
        own_rank = dist.get_rank()
        group_by_members: dict[tuple[int, ...], dist.ProcessGroup] = {}

        def create_groups(groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
            """Create every group of an axis, and return the one of this rank. Collective."""
            own_group = None
            for group in groups:
                members = tuple(ranks[i] for i in group)
                if len(members) > 1 and members not in group_by_members:
                    group_by_members[members] = new_group(list(members))
                if own_rank in members and len(members) > 1:
                    own_group = group_by_members[members]
            return own_group

        dispatch_group = None
        if new_dispatch_group is not None:
            for group in parallel.dispatch_groups():
                members = [ranks[i] for i in group]
                created = new_dispatch_group(members)
                dispatch_group = created if own_rank in members else dispatch_group
        own_groups = {f"{name}_group": create_groups(groups) for name, groups in parallel.process_groups().items()}
        return cls(
            parallel, ranks.index(own_rank) if own_rank in ranks else -1, dispatch_group=dispatch_group, **own_groups
        )
