"""Count the elements of a model for planning, as the model's parameter table (`fusion.model.table`) holds them.

The table is read for one layer of each kind, with one of its experts, on every rank of a TP group. What these ranks
hold of a tensor they hold in every layout with this TP: the layers of a kind are alike, and so are its experts, which
EP and ETP divide evenly. So a model of 61 layers with 256 experts each takes some tens of rows for each size of TP, and
a layout some additions.

Layers that predict further tokens, which lie on the host, are not counted. Correction biases are counted with their
layers, though every card holds those of all layers: some KiB, which no switch moves.

Invariant: the elements of a rank are those of `local_params`, but for these, tensor by tensor, on every rank of every
layout."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm
from typing import Literal

from fusion.costmodel.attention import AttentionCost, attention_cost
from fusion.model import ModelConfig, Parallel
from fusion.model.adapters import Adapters
from fusion.model.boxes import Box, numel
from fusion.model.local_param import LocalParam
from fusion.model.spec import LayerSpec, Sparse
from fusion.model.table import EMBEDDING, local_params

Scope = int | Literal["embed", "head"]
"""A kind of layer, by its index in `Shape.kinds`; the embedding; what follows the layers"""
Share = tuple[int, int, int]
"""(start, stop, of): what a rank holds of the dimension that is cut, in lowest terms"""
WHOLE: Share = (0, 1, 1)


@dataclass(frozen=True)
class Tensor:
    """A global tensor outside the experts. ``shares``: of each TP rank. ``tp_sharded``: it is stored in a local tensor
    that TP cuts. ``in_units``: switches move it (`LocalParam.storage`)."""

    name: str
    numel: int
    shares: tuple[Share, ...]
    tp_sharded: bool
    in_units: bool

    @property
    def held(self) -> int:
        """Elements on a TP rank; all have equally many."""
        start, stop, of = self.shares[0]
        return self.numel * (stop - start) // of


@dataclass(frozen=True)
class Shape:
    """A model under the name of its preset; ``config`` is without ``adapters``, which alone are trained, if it has
    some."""

    name: str
    config: ModelConfig
    adapters: Adapters | None = None

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.config.layers))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Layer → index of its kind."""
        index = {kind: i for i, kind in enumerate(self.kinds)}
        return tuple(index[layer] for layer in self.config.layers)

    @cached_property
    def attention(self) -> AttentionCost:
        return attention_cost(self.config.attention)

    @property
    def tied(self) -> bool:
        """Return whether the last pipeline stage has a copy of the embedding."""
        return self.config.tie_embeddings and not self.config.num_labels

    @cached_property
    def routed(self) -> int:
        """Elements of all experts of all layers."""
        return sum(self.routed_of(kind) for kind in self.kind_of)

    @cached_property
    def dense(self) -> int:
        """Elements outside the experts, embedding and head included."""
        scopes: tuple[Scope, ...] = (*self.kind_of, "embed", "head")
        return sum(self.held(scope, tp=1) for scope in scopes)

    @property
    def numel(self) -> int:
        return self.dense + self.routed

    @property
    def active(self) -> int:
        """Elements a token is multiplied with: neither the experts it is not routed to nor the embedding."""
        config = self.config
        chosen = self.routed * config.top_k // config.num_experts if config.num_experts else 0
        return self.dense + chosen - (0 if self.tied else self.held("embed", tp=1))

    def kinds_of_stage(self, parallel: Parallel, stage: int) -> Counter[int]:
        """Return index of a kind → number of its layers in a pipeline stage."""
        if (parallel.pp, stage) not in self._by_stage:
            layers = parallel.layers(self.config.num_layers, stage)
            self._by_stage[parallel.pp, stage] = Counter(self.kind_of[layers.start : layers.stop])
        return self._by_stage[parallel.pp, stage]

    def held(self, scope: Scope, tp: int) -> int:
        """Return the elements on a TP rank of what a scope has outside the experts."""
        if (scope, tp) not in self._held:
            self._held[scope, tp] = sum(tensor.held for tensor in self.tensors(scope, tp))
        return self._held[scope, tp]

    def routed_of(self, kind: int) -> int:
        """Return the elements of all experts of a layer."""
        return sum(self.stacks_of(kind))

    def stacks_of(self, kind: int) -> tuple[int, ...]:
        """Return the elements of each stack of equal matrices of all experts of a layer."""
        return self._stacks[kind]

    def adapters_of(self, kind: int, tp: int) -> tuple[int, int]:
        """Return the elements of a layer's adapters: outside the experts on a TP rank, and those of all its experts.
        The model must have some."""
        if (kind, tp) not in self._adapters:
            trained = [row for row in self._rows(self.kinds[kind], tp, 0, self.adapters) if row.trained]
            numel, of_expert = sum(row.numel for row in trained), sum(row.numel for row in trained if row.expert)
            self._adapters[kind, tp] = numel - of_expert, of_expert * self.config.num_experts
        return self._adapters[kind, tp]

    def tensors(self, scope: Scope, tp: int) -> tuple[Tensor, ...]:
        """Return what a scope has outside the experts; in the same order for every ``tp``."""
        if tp not in self._tensors:
            self._tensors[tp] = self._read(tp)
        return self._tensors[tp][scope]

    def num_tensors(self, kind: int) -> int:
        """Return the number of global tensors of a layer, those of the experts counted once."""
        return len(self.tensors(kind, 1)) + len({part.name for row in self._experts[kind] for part in row.parts})

    def kv_bytes(self, tp: int, pp: int = 1, itemsize: int = 2, dcp: int = 1) -> int:
        """Return the bytes of one token's KV cache on one rank of the longest pipeline stage."""
        return self.attention.kv_elements_of_rank(tp, dcp) * -(-self.config.num_layers // pp) * itemsize

    @cached_property
    def _by_stage(self) -> dict[tuple[int, int], Counter[int]]:
        return {}

    @cached_property
    def _stacks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.config.num_experts * row.numel for row in rows) for rows in self._experts)

    @cached_property
    def _held(self) -> dict[tuple[Scope, int], int]:
        return {}

    @cached_property
    def _adapters(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {}

    @cached_property
    def _tensors(self) -> dict[int, dict[Scope, tuple[Tensor, ...]]]:
        return {}

    @cached_property
    def _experts(self) -> tuple[list[LocalParam], ...]:
        """The rows of one expert of each kind of layer."""
        return tuple([row for row in self._rows(kind, 1, 0) if row.expert] for kind in self.kinds)

    def _read(self, tp: int) -> dict[Scope, tuple[Tensor, ...]]:
        tensors: dict[Scope, tuple[Tensor, ...]] = {}
        for kind, spec in enumerate(self.kinds):
            whole, ranks = self._rows(spec, 1, 0), [self._rows(spec, tp, rank) for rank in range(tp)]
            for scope in (kind, "embed", "head"):
                tensors[scope] = _tensors(
                    *([row for row in rows if _scope(row, kind) == scope] for rows in (whole, *ranks))
                )
        return tensors

    def _rows(self, kind: LayerSpec, tp: int, tp_rank: int, adapters: Adapters | None = None) -> tuple[LocalParam, ...]:
        """Return the table of a TP rank of a model that has one layer, with one expert on each rank."""
        experts = kind.mlp.num_experts if isinstance(kind.mlp, Sparse) else 1
        one_layer = replace(self.config.without_predictors, layers=(kind,), adapters=adapters)
        return local_params(one_layer, Parallel(lcm(tp, experts), tp=tp, ep=experts), tp_rank)


def _scope(row: LocalParam, kind: int) -> Scope | None:
    """Return the scope of a row of a table with one layer; None for an expert's."""
    if row.expert:
        return None
    if row.layer is not None:
        return kind
    return "embed" if row.parts[0].name == EMBEDDING else "head"


def _tensors(whole: list[LocalParam], *ranks: list[LocalParam]) -> tuple[Tensor, ...]:
    """Return the tensors of a scope, given its unsharded rows and those of every TP rank."""
    held = [_boxes(rows) for rows in ranks]
    sharded = {part.name for row in whole if row.tp_sharded for part in row.parts}
    in_units = {part.name for row in whole if row.storage == "unit" for part in row.parts}
    return tuple(
        Tensor(name, numel(box), tuple(_share(boxes[name], box) for boxes in held), name in sharded, name in in_units)
        for name, box in _boxes(whole).items()
    )


def _boxes(rows: list[LocalParam]) -> dict[str, Box]:
    """Return global tensor → the box that the rows hold of it, which may be in several parts."""
    regions: dict[str, list[Box]] = {}
    for row in rows:
        for part in row.parts:
            regions.setdefault(part.name, []).append(part.region)
    boxes = {name: _hull(parts) for name, parts in regions.items()}
    assert all(numel(boxes[name]) == sum(map(numel, parts)) for name, parts in regions.items()), "parts with gaps"
    return boxes


def _hull(boxes: list[Box]) -> Box:
    return tuple((min(start for start, _ in ends), max(stop for _, stop in ends)) for ends in zip(*boxes, strict=True))


def _share(box: Box, whole: Box) -> Share:
    """Return what a box holds of a whole tensor, of which at most one dimension is cut."""
    cut = [(start, stop, size) for (start, stop), (_, size) in zip(box, whole, strict=True) if stop - start < size]
    assert len(cut) <= 1
    if not cut:
        return WHOLE
    divisor = gcd(*cut[0])
    start, stop, size = cut[0]
    return start // divisor, stop // divisor, size // divisor
