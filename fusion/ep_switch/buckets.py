"""Check the storage of a switch: the units of both ends against their layouts and against each other."""

from collections.abc import Mapping

from fusion.ep_switch.layout import Layout
from fusion.model.holder import WeightHolder
from fusion.model.weights import Buckets

Holder = WeightHolder | Buckets | None
"""A model, its storage, or None on a rank that holds nothing of that end of the switch."""


def buckets_of(holder: Holder, layout: Layout, rank: int) -> Buckets | None:
    """Return the storage of one end of a switch, checked against the layout that the plan was made from.
    Raise AssertionError: its parameters, units or dtype differ from the layout's."""
    buckets = holder if holder is None or isinstance(holder, Buckets) else holder.weights
    if buckets is None:
        assert rank not in layout.ranks, f"rank {rank} belongs to {layout}, but has no weights"
        return None
    if layout.trained_only:
        buckets = buckets.trained()
    actual = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in buckets.plans]
    expected = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in layout.units(rank)]
    assert actual == expected, f"the weights of rank {rank} are not stored as in {layout}"
    assert buckets.dtype == layout.dtype, f"the weights of rank {rank} are {buckets.dtype}, in {layout} {layout.dtype}"
    return buckets


def check_sharing(source: Buckets | None, target: Buckets | None, shared: Mapping[int, int], rank: int) -> None:
    """Check which units both ends share.
    Raise AssertionError: the units with common storage differ from ``shared`` (unit of the target → of the source)."""
    if source is None or target is None:
        return
    unit_of = {flat.untyped_storage()._cdata: index for index, flat in enumerate(source.flats)}
    storages = [flat.untyped_storage()._cdata for flat in target.flats]
    actual = {index: unit_of[storage] for index, storage in enumerate(storages) if storage in unit_of}
    assert actual == shared, (
        f"rank {rank} shares {len(actual)} units between the two models, the plan {len(shared)}: build the second "
        "model with share=, the weights of the first"
    )


def check_resident(source: Buckets | None, target: Buckets | None, shared: Mapping[int, int], rank: int) -> int:
    """Return the bytes that the source holds.
    Raise AssertionError: a unit of the source is not resident, or a unit of the target that is not shared is."""
    held = [source.held(unit) for unit in range(len(source.flats))] if source is not None else []
    assert all(held), f"the weights of rank {rank} are not resident: there is nothing to switch from"
    if target is not None:
        own = sum(target.held(unit) for unit in range(len(target.flats)) if unit not in shared)
        assert own == 0, f"rank {rank} already holds {own} bytes of the target: release it before the switch"
    return sum(held)
