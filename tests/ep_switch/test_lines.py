"""Lines between ranks: messages of any length, both ways at once, and the end of a line."""

from __future__ import annotations

import threading

from fusion.ep_switch.lines import PIECE_BYTES, Door


def pair():
    doors = {rank: Door() for rank in (0, 1)}
    addresses, lines = {rank: door.address for rank, door in doors.items()}, {}

    def meet(rank):
        lines[rank] = doors[rank].meet(rank, addresses)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return lines[0], lines[1]


def test_long_messages_arrive_whole_in_order_though_both_sides_speak_first():
    """Far more than a socket holds: whoever waited for room without listening would wait for ever."""
    said = [bytes([index]) * size for index, size in enumerate((1, PIECE_BYTES, PIECE_BYTES + 1, 3_000_000, 5))]
    heard: dict[int, list[bytes]] = {0: [], 1: []}

    def talk(rank, line):
        for message in said:
            line.tell(1 - rank, message)
        while len(heard[rank]) < len(said):
            heard[rank] += [message for _, message in line.hear(10)]

    threads = [threading.Thread(target=talk, args=item, daemon=True) for item in enumerate(pair())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "both wait for each other"
    assert heard == {0: said, 1: said}


def test_who_is_gone_is_known_and_told_nothing():
    one, other = pair()
    other.tell(0, b"a last word")
    other.close()
    assert one.hear(10) == [(1, b"a last word")]
    assert one.hear(10) == [] and one.gone == {1}
    one.tell(1, b"x" * 1_000_000)
