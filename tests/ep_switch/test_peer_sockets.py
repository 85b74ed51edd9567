"""Sockets between ranks: messages of any length, both ways at once, and the end of a peer."""

from __future__ import annotations

import threading

from fusion.ep_switch.peer_sockets import PIECE_BYTES, Listener


def pair():
    listeners = {rank: Listener() for rank in (0, 1)}
    addresses, sockets = {rank: listener.address for rank, listener in listeners.items()}, {}

    def connect(rank):
        sockets[rank] = listeners[rank].connect(rank, addresses)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return sockets[0], sockets[1]


def test_long_messages_arrive_whole_and_in_order_when_both_ends_send_first():
    """Far more than a socket holds: a sender that waited for room without receiving would wait for ever."""
    sent = [bytes([index]) * size for index, size in enumerate((1, PIECE_BYTES, PIECE_BYTES + 1, 3_000_000, 5))]
    received: dict[int, list[bytes]] = {0: [], 1: []}

    def talk(rank, sockets):
        for message in sent:
            sockets.send(1 - rank, message)
        while len(received[rank]) < len(sent):
            received[rank] += [message for _, message in sockets.receive(10)]

    threads = [threading.Thread(target=talk, args=item, daemon=True) for item in enumerate(pair())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "both wait for each other"
    assert received == {0: sent, 1: sent}


def test_a_closed_peer_is_known_and_messages_to_it_are_dropped():
    one, other = pair()
    other.send(0, b"a last word")
    other.close()
    assert one.receive(10) == [(1, b"a last word")]
    assert one.receive(10) == [] and one.closed == {1}
    one.send(1, b"x" * 1_000_000)
