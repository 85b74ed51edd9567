"""Count requests and payload bytes of one batch, read by every rank for itself or once per group. Pure functions."""

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
    """Count the requests for one batch of every replica: (flat, leader).

    flat: every rank requests for itself. leader: one request per replica of ``group`` ranks.

    Raises:
        ValueError: ``ranks`` is not a multiple of ``group``.
    """
    if group < 1 or ranks % group:
        raise ValueError(f"{ranks} ranks in groups of {group}: the group size must divide the number of ranks")
    return ranks, ranks // group
