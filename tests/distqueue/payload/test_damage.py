"""Damage costs the samples that it hit, however much of it there is, and whatever happens to their shard meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import ray

from distqueue.client import MAX_MOVES, DistQueue
from distqueue.errors import Damage
from distqueue.fleet import Fleet, ShardHandle
from distqueue.messages import Delivery
from distqueue.payload.segment_file import SegmentDamaged


class Client:
    """Fetches a delivery of samples, each in a segment of its own."""

    _copy = DistQueue._copy

    def __init__(self, damaged: int, ends: bool) -> None:
        """The first ``damaged`` samples are damaged; ``ends``: where they are stored, too, so that they end."""
        self._damaged, self._ends = damaged, ends
        self._payload, self.traffic = self, SimpleNamespace(received_bytes=0)

    def gather(self, delivery):
        if int(delivery.ids[0]) < self._damaged:
            raise SegmentDamaged([int(delivery.ids[0])])
        return {}

    def _call(self, method, question, number):
        return [Damage("q", (str(number),), "", "s")] if self._ends else []

    def _locate_again(self, delivery, columns):
        return delivery_of(delivery.ids[self._ends :])


def delivery_of(ids):
    return Delivery(tuple(map(str, ids)))


def test_any_number_of_damaged_segments_costs_their_samples_only() -> None:
    damaged, found = 3 * MAX_MOVES, []
    batch = Client(damaged, ends=True)._copy(delivery_of(range(damaged + 2)), ["n"], found)
    assert batch.ids == (str(damaged), str(damaged + 1)) and len(found) == damaged


def test_damage_in_this_process_alone_ends_a_read_by_name() -> None:
    with pytest.raises(RuntimeError, match="in this process's memory, not where they are stored"):
        Client(1, ends=False)._copy(delivery_of([0, 1]), ["n"])


@pytest.mark.parametrize("question", ["find_damaged", "find_lost"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_shard_that_restarts_or_has_ended_is_no_error_of_the_read(question: str, ended: bool) -> None:
    error = ray.exceptions.ActorDiedError() if ended else ray.exceptions.ActorUnavailableError("restarts", None)

    async def answer(*_):
        raise error

    method, lost = SimpleNamespace(remote=answer), []
    segments = {7: SimpleNamespace(number=7, shard="s", path="p")}
    ledger = SimpleNamespace(
        segments=segments, of_shard=lambda name: segments.values(), shards={"s": SimpleNamespace(leaving=False)}
    )
    core = SimpleNamespace(ledger=ledger, lose=lambda numbers, why, now: lost.extend(numbers) or ["a"])
    fleet = Fleet(core, options=None, epoch="0", queue="q", settle=None)
    fleet.shards["s"] = ShardHandle("node", SimpleNamespace(damaged=method, holds=method, free_bytes=method))
    asked = fleet.find_damaged(7) if question == "find_damaged" else fleet.find_lost([7])
    assert not asyncio.run(asked)
    assert lost == ([7] if ended else []) and ("s" in fleet.shards) != ended
