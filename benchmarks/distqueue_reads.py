"""Counts requests and payload bytes for one batch, read by every rank for itself or once per group: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distqueue.hierarchy.tree import Member


class Reads(NamedTuple):
    """Requests to the queue for one batch, and payload bytes that leave it."""

    requests: int
    nbytes: int


def flat_reads(members: Sequence[Member], nbytes: Mapping[str, int]) -> Reads:
    """Count what a group reads if every rank requests its own columns; one that needs only lengths costs no bytes.

    ``nbytes``: bytes of each column of the batch.
    """
    return Reads(len(members), sum(nbytes[name] for member in members for name in member.columns))


def leader_reads(members: Sequence[Member], nbytes: Mapping[str, int]) -> Reads:
    """Count what a group reads if its leader requests the union of all columns once."""
    return Reads(1, sum(nbytes[name] for name in frozenset[str]().union(*(member.columns for member in members))))


def requests(ranks: int, group: int) -> tuple[int, int]:
    """Requests for one batch of every replica: (each rank for itself, one leader per replica of ``group`` ranks)."""
    if group < 1 or ranks % group:
        raise ValueError(f"{ranks} ranks in groups of {group}: expected groups that divide them")
    return ranks, ranks // group
