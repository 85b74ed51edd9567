"""Sockets between ranks: messages of any length, both ways at once, the end of a peer, and strangers who connect."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.ep_switch import peer_sockets
from fusion.ep_switch.exchange import Vote, lost_rank
from fusion.ep_switch.exchange_shared import READ, READY, VOTE, Message, PeerLost, PeerMessages, Ready
from fusion.ep_switch.peer_sockets import (
    ENDED,
    MALFORMED,
    MAX_UNGREETED,
    PIECE_BYTES,
    Invitation,
    Listener,
    PeerSockets,
    is_trusted,
)
from fusion.npu import HANDLE_BYTES
from tests.machine import patience

NOBODY = 65534


def pair(before_connecting=lambda listeners: None):
    listeners = {rank: Listener() for rank in (0, 1)}
    before_connecting(listeners)
    invitations, sockets = {rank: listener.invitation for rank, listener in listeners.items()}, {}

    def connect(rank):
        sockets[rank] = listeners[rank].connect(rank, invitations)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    return sockets[0], sockets[1]


def call(address, *messages):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    for message in messages:
        connection.send(message)
    return connection


def as_nobody(act):
    """Forks; calls ``act`` as the user nobody; returns the exit status: 0 if it returned true."""
    if not (pid := os.fork()):
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
    assert one.receive(10) == [] and one.closed == {1: ENDED}
    one.send(1, b"x" * 1_000_000)


def test_processes_that_connect_and_send_garbage_or_nothing_neither_delay_nor_join_the_ranks():
    callers = []

    def intrude(listeners):
        own = listeners[0].invitation
        greeting = struct.Struct("<8sI32s")
        for message in (
            b"\x80\x04\x95",  # the beginning of a pickle
            secrets.token_bytes(PIECE_BYTES),
            greeting.pack(b"rlfusion", 1, bytes(32)),  # knows the address, which all can list, not the secret
            greeting.pack(b"rlfusion", 7, bytes.fromhex(own.secret)),  # no rank of the group
        ):
            callers.append(call(own.address, message))
        callers.append(call(own.address))  # and says nothing
        call(own.address).close()

    began = time.monotonic()
    one, other = pair(intrude)
    assert time.monotonic() - began < patience(10), "silent ones are not waited for"
    one.send(1, b"among ourselves")
    assert other.receive(10) == [(0, b"among ourselves")]
    for caller in callers:
        caller.settimeout(patience(10))
        with suppress(ConnectionResetError):
            assert caller.recv(1) == b"", "its connection is closed"


def test_more_silent_callers_than_a_listener_keeps_do_not_shut_the_ranks_out():
    callers = []

    def intrude(listeners):
        callers.extend(call(listeners[0].invitation.address) for _ in range(3 * MAX_UNGREETED))

    one, other = pair(intrude)
    one.send(1, b"still here")
    assert other.receive(10) == [(0, b"still here")]


def test_a_rank_that_never_connects_is_named_in_time():
    listener, absent = Listener(), Listener()
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        listener.connect(0, {0: listener.invitation, 1: absent.invitation}, timeout_s=0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_rank_that_accepts_and_by_the_rank_that_connects(monkeypatch):
    def enters(invitation, rank):
        """Whether one who has even learned the secret gets an answer."""
        secret = bytes.fromhex(invitation.secret)
        try:
            connection = call(invitation.address, struct.pack("<8sI32s", b"rlfusion", rank, secret))
            connection.settimeout(patience(20))
            return connection.recv(1) != b""
        except OSError:
            return False

    listeners, joined = {rank: Listener() for rank in (0, 1)}, []
    invitations = {rank: listener.invitation for rank, listener in listeners.items()}
    thread = threading.Thread(target=lambda: joined.append(listeners[0].connect(0, invitations)))
    thread.start()
    assert as_nobody(lambda: enters(invitations[0], 1)) == 1
    other = listeners[1].connect(1, invitations)
    thread.join()
    joined[0].send(1, b"among ourselves")
    assert other.receive(10) == [(0, b"among ourselves")], "the place of rank 1 was not taken"

    ready, done = os.pipe(), os.pipe()

    def serve():
        there = Listener()
        os.write(ready[1], there.invitation.address.encode())
        os.read(done[0], 1)
        return True

    pid_thread = threading.Thread(target=lambda: as_nobody(serve))
    pid_thread.start()
    address = os.read(ready[0], 200).decode()
    with pytest.raises(ConnectionError, match="rank 0 belongs to a process of another user"):
        Listener().connect(1, {0: Invitation(address, "00" * 32), 1: invitations[1]})
    os.write(done[1], b".")
    pid_thread.join()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert is_trusted(here) and is_trusted(there)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert is_trusted(here), "root may do all anyway"


@pytest.mark.parametrize("pieces", [[b""], [b"\7hello"], [b"\0" + bytes(PIECE_BYTES + 1)], [b"\1" + bytes(9)] * 3])
def test_a_peer_that_breaks_the_protocol_is_disconnected(pieces, monkeypatch):
    """An unknown mark, a piece that is too long, and a message that does not end."""
    monkeypatch.setattr(peer_sockets, "MAX_MESSAGE_BYTES", 20)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets = PeerSockets({1: here})
    for piece in pieces:
        there.send(piece)
    if pieces == [b""]:
        there.close()
    for _ in pieces:
        assert sockets.receive(1) == []
    assert sockets.closed == {1: ENDED if pieces == [b""] else MALFORMED}
    sockets.send(1, b"dropped")


def test_a_message_that_no_peer_would_accept_is_not_sent(monkeypatch):
    monkeypatch.setattr(peer_sockets, "MAX_MESSAGE_BYTES", 20)
    with pytest.raises(ValueError, match="21 bytes to rank 1: expected at most 20"):
        PeerSockets({}).send(1, bytes(21))


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_value_error(data):
    try:
        message = Message.decode(data)
    except ValueError:
        return
    assert message.kind in (READY, READ, VOTE) and message.index >= 0


@given(kind=st.integers(0, 3), index=st.integers(-3, 3), count=st.integers(-5, 5), payload=st.binary(max_size=200))
def test_lengths_and_bounds_of_a_message_are_checked(kind, index, count, payload):
    try:
        message = Message.decode(struct.pack("<Bqi", kind, index, count) + payload)
    except ValueError:
        return
    if message.ready is not None:
        assert len(message.ready.handles) == count * HANDLE_BYTES
        assert message.ready.handles + message.ready.sums == payload and len(message.ready.sums) % 8 == 0


def test_what_ranks_send_each_other_is_decoded_as_it_was():
    one, other = pair()
    sent, received = PeerMessages(one, [1]), PeerMessages(other, [0])
    received.begin()
    vote = Vote((lost_rank(1, "gone", round_=3, parameter="w"),), digest=5)
    handles = b"".join(bytes([number]) * HANDLE_BYTES for number in range(3))
    sent.send(1, READY, 2, handles=handles, payload=bytes(16))
    sent.send(1, READ, 4)
    sent.send(1, VOTE, payload=vote.encode())
    with pytest.raises(PeerLost, match="has left the switch"):
        received.wait_until([0], 10, arrived=lambda peer: False)
    assert received.ready[0] == {2: Ready(handles, bytes(16))}
    assert received.read[0] == 4 and received.votes[0] == [vote]


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b"[1, 2]", b'["1", []]', b"[1, [{}]]", b'[1, [{"rank": "0"}]]', b"\x80\x04\x95", b"[" * 99999],
)
def test_votes_of_any_other_form_are_value_errors(data):
    with pytest.raises(ValueError):
        Vote.decode(data)


def test_a_malformed_message_loses_its_sender_with_that_reason_at_once():
    one, other = pair()
    messages = PeerMessages(one, [1])
    messages.begin()
    other.send(0, b"\x80\x04\x95 a pickle, perhaps")
    began = time.monotonic()
    with pytest.raises(PeerLost, match=f"rank 1: {MALFORMED}"):
        messages.wait_until([1], 60, arrived=lambda peer: False)
    assert time.monotonic() - began < patience(10)
