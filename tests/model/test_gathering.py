"""Which parts of global tensors a rank sends together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusion.model.gathering import MESSAGE_BYTES, _messages
from fusion.model.local_param import Part

ROW_BYTES = 1 << 16

parts = st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 20))
"""Rank, whether in float32, and rows: 20 of them in float32 are more than a message holds"""


def _size(param: Any, part: Part) -> int:
    return part.shape[0] * ROW_BYTES * (2 if param.float32 else 1)


@given(st.lists(st.lists(parts, min_size=1, max_size=3), max_size=12))
def test_every_part_is_sent_once_in_order_by_its_rank_in_as_few_messages_as_hold_it(tensors):
    owners: dict[str, list[tuple[int, Any, Part]]] = {}
    for number, holders in enumerate(tensors):
        owners[str(number)] = [
            (rank, SimpleNamespace(float32=float32), Part(f"{number}.{place}", ((0, rows), (0, ROW_BYTES // 2)), ()))
            for place, (rank, float32, rows) in enumerate(holders)
        ]
    messages = {rank: list(sent) for rank, sent in _messages(owners, itemsize=2).items()}
    for rank in (0, 1, 2):
        own = [(param, part) for holders in owners.values() for holder, param, part in holders if holder == rank]
        assert [one for message in messages.get(rank, []) for one in message] == (own if rank else [])
    for sent in messages.values():
        for message in sent:
            assert len({param.float32 for param, _ in message}) == 1
            assert len(message) == 1 or sum(_size(*one) for one in message) <= MESSAGE_BYTES
        for message, (following, *_) in zip(sent, sent[1:], strict=False):
            full = sum(_size(*one) for one in message) + _size(*following) > MESSAGE_BYTES
            assert full or following[0].float32 != message[0][0].float32
