"""The grid of ranks: pure arithmetic (`Parallel`) and one rank's process groups (`Mesh`).

Attention and dense weights: tensor parallel is the fastest axis, data parallel the next. Experts: expert parallel is
the fastest axis, expert-data parallel (replicas of an expert) the next. The two grids cover the same ranks
independently, as Megatron-Core lays them out, so TP2 EP2 on four ranks is:

    rank   0  1  2  3
    tp     0  1  0  1      dp   0  0  1  1
    ep     0  1  0  1      edp  0  0  1  1

Tokens between two blocks are split over TP (sequence parallel), so that every rank of an EP group brings other tokens
to the experts, whatever TP is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from fusion.model.config import ModelConfig

Axis = Literal["tp", "dp", "ep", "edp"]


@dataclass(frozen=True)
class Parallel:
    """Sizes of one layout. ``world`` ranks; tensor parallel ``tp``; expert parallel ``ep``."""

    world: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, size in (("tp", self.tp), ("ep", self.ep)):
            if size < 1 or self.world % size:
                raise ValueError(f"{axis}={size} does not divide the {self.world} ranks of the layout")

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def edp(self) -> int:
        return self.world // self.ep

    def coordinate(self, axis: Axis, rank: int) -> int:
        match axis:
            case "tp":
                return rank % self.tp
            case "dp":
                return rank // self.tp
            case "ep":
                return rank % self.ep
            case "edp":
                return rank // self.ep

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks along an axis, each in the order of the axis."""
        other: Axis = {"tp": "dp", "dp": "tp", "ep": "edp", "edp": "ep"}[axis]  # type: ignore[assignment]
        members: dict[int, list[int]] = {}
        for rank in range(self.world):
            members.setdefault(self.coordinate(other, rank), []).append(rank)
        return tuple(tuple(group) for group in members.values())

    def check(self, config: ModelConfig, key: str) -> None:
        """Raises:
        ValueError: a dimension of the model that the layout does not divide, with both numbers; ``key`` names the
            config node the user has to change.
        """
        wanted = {
            "num_attention_heads": config.num_heads,
            "vocab_size": config.vocab_size,
            "intermediate_size": config.intermediate_size if not config.num_experts else self.tp,
        }
        for name, size in wanted.items():
            if size % self.tp:
                raise ValueError(f"{key}.tp={self.tp} does not divide the model's {name}={size}")
        if config.num_kv_heads % self.tp and self.tp % config.num_kv_heads:
            raise ValueError(
                f"{key}.tp={self.tp} neither divides nor is a multiple of the model's "
                f"num_key_value_heads={config.num_kv_heads}"
            )
        if config.num_experts == 0 and self.ep > 1:
            raise ValueError(f"{key}.ep={self.ep} needs experts, but the model is dense; set it to 1")
        if config.num_experts % self.ep:
            raise ValueError(f"{key}.ep={self.ep} does not divide the model's num_experts={config.num_experts}")

    def __str__(self) -> str:
        return f"TP{self.tp}EP{self.ep}DP{self.dp}"


@dataclass(frozen=True)
class Mesh:
    """One rank's place in a layout and its process groups; a group is None where it has one member."""

    parallel: Parallel
    rank: int
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    edp_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None

    @property
    def tp_rank(self) -> int:
        return self.parallel.coordinate("tp", self.rank)

    @property
    def dp_rank(self) -> int:
        return self.parallel.coordinate("dp", self.rank)

    @property
    def ep_rank(self) -> int:
        return self.parallel.coordinate("ep", self.rank)

    @property
    def edp_rank(self) -> int:
        return self.parallel.coordinate("edp", self.rank)

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

        axes: tuple[Axis, ...] = ("tp", "dp", "ep", "edp")
        found = {f"{axis}_group": group_of(parallel.groups(axis)) for axis in axes}
        world = group_of((tuple(range(parallel.world)),))
        return cls(parallel, ranks.index(me) if me in ranks else -1, world_group=world, **found)
