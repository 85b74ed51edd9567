"""Compute sizes, coordinates and groups of ranks of one layout. Pure; `mesh.py` creates the process groups.

A pipeline stage is a range of consecutive ranks. Inside a stage, attention and dense weights have tensor parallel as
the fastest axis and data parallel as the next; experts have expert-tensor parallel (an expert split over ranks) as the
fastest, expert parallel as the next, and expert-data parallel (replicas of an expert) as the last. The two grids cover
the ranks of a stage independently, as in Megatron-Core, so TP2 EP2 PP2 on eight ranks is:

    rank   0  1  2  3 | 4  5  6  7
    pp     0  0  0  0 | 1  1  1  1
    tp     0  1  0  1 | 0  1  0  1      dp   0  0  1  1 | 0  0  1  1
    ep     0  1  0  1 | 0  1  0  1      edp  0  0  1  1 | 0  0  1  1

Tokens are split over TP between blocks (sequence parallel), so that every rank of an EP group sends different tokens
to the experts, for any TP.

Context parallel (cp) divides data parallel for the samples alone: cp consecutive DP ranks are one replica, which has
the same samples, and each computes a share of their rows (`fusion.model.ulysses`). Decode context parallel (dcp)
divides tensor parallel for the KV cache alone: dcp consecutive TP ranks, whose keys and values are the same, store a
share of each sequence each (`fusion.inference.context`). Weights, their optimizer states and where they lie depend on
neither."""

from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Literal

from fusion.model.config import ModelConfig

Axis = Literal["tp", "cp", "replica", "dp", "etp", "ep", "edp", "pp", "dcp", "heads"]
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "etp", "ep", "edp", "pp", "dcp")
"""Axes that have process groups"""
_GRIDS: tuple[tuple[Axis, ...], ...] = (
    ("pp", "tp", "dp"),
    ("pp", "etp", "ep", "edp"),
    ("pp", "tp", "cp", "replica"),
    ("pp", "dcp", "heads", "dp"),
)

CARD_ONLY = frozenset(("cp", "etp", "ep", "edp", "ends", "dcp"))
"""Process groups in which only cards communicate, and the host never does"""
REPLAYED = frozenset(("etp", "ep"))
"""Those of these groups in which hosts exchange numbers of rows where a trainer replays routing"""
MIN_DISPATCH_RANKS = 16
"""EP ranks from which on a card's operators may send rows to experts, in a group that is used for nothing else"""


@dataclass(frozen=True)
class Parallel:
    """Hold the sizes of one layout: ``world`` ranks in ``pp`` stages; tensor parallel ``tp``; expert parallel ``ep``;
    expert-tensor parallel ``etp``; context parallel ``cp``, within data parallel; decode context parallel ``dcp``,
    within tensor parallel."""

    world: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    etp: int = 1
    cp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "ep", "pp", "etp", "cp", "dcp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis}={getattr(self, axis)}: expected at least 1")
        if self.world % self.pp:
            raise ValueError(
                f"pp={self.pp} does not divide the {self.world} ranks of the layout: {_one_of(self.world)}"
            )
        ranks = f"{self.stage_world} ranks of " + ("the layout" if self.pp == 1 else f"a stage (pp={self.pp})")
        for axis, size in (("tp", self.tp), ("ep", self.ep), ("etp", self.etp), ("ep x etp", self.ep * self.etp)):
            if self.stage_world % size:
                raise ValueError(f"{axis}={size} does not divide the {ranks}: {_one_of(self.stage_world)}")
        if self.dp % self.cp:
            raise ValueError(f"cp={self.cp} does not divide the {self.dp} data-parallel ranks: {_one_of(self.dp)}")
        if self.tp % self.dcp:
            raise ValueError(f"dcp={self.dcp} does not divide tp={self.tp}: {_one_of(self.tp)}")

    @property
    def stage_world(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def dp(self) -> int:
        return self.stage_world // self.tp

    @property
    def replicas(self) -> int:
        """Groups of ranks of a stage that compute the same samples: data parallel, divided by context parallel."""
        return self.dp // self.cp

    @property
    def edp(self) -> int:
        return self.stage_world // (self.ep * self.etp)

    @property
    def of_weights(self) -> "Parallel":
        """The layout of the weights, on which neither kind of context parallel has influence."""
        return replace(self, cp=1, dcp=1)

    @property
    def of_one_engine(self) -> "Parallel":
        """The layout of one engine: the smallest range of ranks with complete TP, expert and pipeline groups."""
        return replace(self, world=self.pp * lcm(self.tp, self.ep * self.etp))

    def coordinate(self, axis: Axis, rank: int) -> int:
        place = rank % self.stage_world
        match axis:
            case "tp":
                return place % self.tp
            case "cp":
                return place // self.tp % self.cp
            case "replica":
                return place // (self.tp * self.cp)
            case "dp":
                return place // self.tp
            case "dcp":
                return place % self.dcp
            case "heads":
                return place % self.tp // self.dcp
            case "etp":
                return place % self.etp
            case "ep":
                return place // self.etp % self.ep
            case "edp":
                return place // (self.etp * self.ep)
            case "pp":
                return rank // self.stage_world

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks along an axis, each in the order of the axis."""
        grid = next(grid for grid in _GRIDS if axis in grid)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            others = tuple(self.coordinate(other, rank) for other in grid if other != axis)
            members.setdefault(others, []).append(rank)
        return tuple(tuple(group) for group in members.values())

    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Return the pairs of ranks that hold the same rows of the embedding on the first and the last stage."""
        return tuple((group[0], group[-1]) for group in self.groups("pp")) if self.pp > 1 else ()

    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each pipeline stage."""
        size = self.stage_world
        return tuple(tuple(range(stage * size, (stage + 1) * size)) for stage in range(self.pp))

    def process_groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return all groups of ranks by the name of the process group that `mesh.py` makes of them."""
        whole = (tuple(range(self.world)),)
        return {axis: self.groups(axis) for axis in AXES} | {
            "ends": self.ends(),
            "stage": self.stages(),
            "world": whole,
        }

    def dispatch_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each EP group that gets a second process group, in which only `MoE` sends rows."""
        spans = self.etp == 1 and self.ep > self.tp and self.ep % self.tp == 0
        return self.groups("ep") if spans and self.ep >= MIN_DISPATCH_RANKS else ()

    def layers(self, num_layers: int, stage: int) -> range:
        """Return the layers of a pipeline stage: split as evenly as possible, the remainder to earlier stages (the
        last one also computes the logits)."""
        share, rest = divmod(num_layers, self.pp)
        start = stage * share + min(stage, rest)
        return range(start, start + share + (stage < rest))

    def check(self, config: ModelConfig, key: str) -> None:
        """Check that the layout divides the model's dimensions. ``key``: the config node that the user has to change.
        Raise ValueError: the layout does not divide a dimension of the model (with both numbers)."""
        if problem := self.misfit(config):
            raise ValueError(f"{key}.{problem}")

    def misfit(self, config: ModelConfig) -> str | None:
        """Return the axis that does not divide a dimension of the model, with both numbers; None if all do."""
        divisible_sizes = [
            ("num_attention_heads", config.num_heads),
            ("vocab_size", config.vocab_size),
            *config.dense_widths,
        ]
        for name, size in divisible_sizes:
            if size % self.tp:
                fitting = _one_of(self.stage_world, *(size for _, size in divisible_sizes))
                return f"tp={self.tp} does not divide the model's {name}={size}: {fitting}"
        if config.num_heads // self.tp % self.cp:
            return (
                f"cp={self.cp} x tp={self.tp} does not divide the model's num_attention_heads={config.num_heads}: "
                f"{_one_of(self.dp, config.num_heads // self.tp)} for cp"
            )
        if config.num_kv_heads % self.tp and self.tp % config.num_kv_heads:
            return (
                f"tp={self.tp} neither divides nor is a multiple of the model's "
                f"num_key_value_heads={config.num_kv_heads}"
            )
        if (copies := config.attention.kv_copies(self.tp)) % self.dcp:
            return (
                f"dcp={self.dcp}: with tp={self.tp} the same keys and values are on {copies} of the ranks, which alone "
                f"can share them: {_one_of(copies)}"
            )
        for axis in ("ep", "etp"):
            if config.num_experts == 0 and getattr(self, axis) > 1:
                return f"{axis}={getattr(self, axis)} needs experts, but the model is dense; set it to 1"
        if config.num_experts % self.ep:
            fitting = _one_of(self.stage_world // self.etp, config.num_experts)
            return f"ep={self.ep} does not divide the model's num_experts={config.num_experts}: {fitting}"
        if config.num_experts and (width := config.moe_intermediate_size) % self.etp:
            fitting = _one_of(self.stage_world // self.ep, width)
            return f"etp={self.etp} does not divide the model's moe_intermediate_size={width}: {fitting}"
        if config.num_layers < self.pp:
            return f"pp={self.pp} exceeds the model's num_hidden_layers={config.num_layers}"
        return None

    def __str__(self) -> str:
        sizes = (("pp", self.pp), ("etp", self.etp), ("cp", self.cp), ("dcp", self.dcp))
        optional = "".join(f"{axis.upper()}{size}" for axis, size in sizes if size > 1)
        return f"TP{self.tp}EP{self.ep}{optional}DP{self.dp}"


def _one_of(*numbers: int) -> str:
    """Say what is expected of a number that has to divide all these."""
    common = gcd(*numbers)
    return f"expected one of {', '.join(str(n) for n in range(1, common + 1) if common % n == 0)}"
