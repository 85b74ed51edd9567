"""Checks the storage of a switch: the units of both ends against their layouts and against each other."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.ep_switch.layout import Layout
from fusion.model.holder import WeightHolder
from fusion.model.weights import Buckets

Holder = WeightHolder | Buckets | None
"""A model, its storage, or None on a rank that has no share in that end of the switch."""


def buckets_of(holder: Holder, layout: Layout, rank: int) -> Buckets | None:
    """Returns the storage of one end of a switch, checked against the layout the plan was made from.

    Raises:
        AssertionError: other parameters, unit bounds or dtype than the layout's.
    """
    buckets = holder if holder is None or isinstance(holder, Buckets) else holder.weights
    if buckets is None:
        assert rank not in layout.ranks, f"rank {rank} has a share in {layout}, but brought no weights"
        return None
    found = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in buckets.plans]
    expected = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in layout.units(rank)]
    assert found == expected, f"the weights of rank {rank} are not stored as in {layout}"
    assert buckets.dtype == layout.dtype, f"the weights of rank {rank} are {buckets.dtype}, in {layout} {layout.dtype}"
    return buckets


def check_sharing(source: Buckets | None, target: Buckets | None, shared: Mapping[int, int], rank: int) -> None:
    """Checks which units both ends store once.

    Raises:
        AssertionError: other units than ``shared`` (of the target → of the source) are the same storage.
    """
    if source is None or target is None:
        return
    there = {flat.untyped_storage()._cdata: index for index, flat in enumerate(source.flats)}
    storages = [flat.untyped_storage()._cdata for flat in target.flats]
    found = {index: there[storage] for index, storage in enumerate(storages) if storage in there}
    assert found == shared, (
        f"rank {rank} shares {len(found)} units between the two models, the plan {len(shared)}: build the second model "
        "with share=, the weights of the first"
    )


def check_resident(source: Buckets | None, target: Buckets | None, shared: Mapping[int, int], rank: int) -> int:
    """Returns the bytes that the source holds.

    Raises:
        AssertionError: the source is not all there, or something of the target is, other than what it shares.
    """
    held = [source.held(unit) for unit in range(len(source.flats))] if source is not None else []
    assert all(held), f"the weights of rank {rank} are not resident: nothing to switch from"
    if target is not None:
        own = sum(target.held(unit) for unit in range(len(target.flats)) if unit not in shared)
        assert own == 0, f"rank {rank} holds {own} bytes of the target already: release it before the switch"
    return sum(held)
