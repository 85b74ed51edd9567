"""Creates the process groups of one rank in a layout (`parallel.py` says who is in which)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fusion.model.parallel import AXES, Parallel


@dataclass(frozen=True)
class Mesh:
    """One rank's place in a layout and its process groups; a group is None where it has one member.

    ``ends_group``: this rank and the one on the other end of the pipeline, on the first and the last stage.
    """

    parallel: Parallel
    rank: int
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    edp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    ends_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None

    @property
    def tp_rank(self) -> int:
        return self.parallel.coordinate("tp", self.rank)

    @property
    def dp_rank(self) -> int:
        return self.parallel.coordinate("dp", self.rank)

    @property
    def etp_rank(self) -> int:
        return self.parallel.coordinate("etp", self.rank)

    @property
    def ep_rank(self) -> int:
        return self.parallel.coordinate("ep", self.rank)

    @property
    def edp_rank(self) -> int:
        return self.parallel.coordinate("edp", self.rank)

    @property
    def pp_rank(self) -> int:
        return self.parallel.coordinate("pp", self.rank)

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.parallel.pp - 1

    @classmethod
    def single(cls) -> Mesh:
        """One process, no torch.distributed."""
        return cls(Parallel(), 0)

    @classmethod
    def create(cls, parallel: Parallel, ranks: tuple[int, ...] | None = None) -> Mesh:
        """The mesh of the calling process over ``ranks`` (global ranks, in layout order; default: all).

        Collective over the whole world: every process calls it with the same arguments in the same order. A process
        outside ``ranks`` gets a mesh with rank -1.
        """
        if not dist.is_initialized():
            assert parallel.world == 1
            return cls.single()
        ranks = ranks or tuple(range(parallel.world))
        assert len(ranks) == parallel.world
        me = dist.get_rank()
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}

        def group_of(groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
            mine = None
            for group in groups:
                members = tuple(ranks[i] for i in group)
                if len(members) > 1 and members not in made:
                    made[members] = dist.new_group(list(members))
                if me in members and len(members) > 1:
                    mine = made[members]
            return mine

        found = {f"{axis}_group": group_of(parallel.groups(axis)) for axis in AXES}
        found |= {
            "ends_group": group_of(parallel.ends()),
            "stage_group": group_of(parallel.stages()),
            "world_group": group_of((tuple(range(parallel.world)),)),
        }
        return cls(parallel, ranks.index(me) if me in ranks else -1, **found)
