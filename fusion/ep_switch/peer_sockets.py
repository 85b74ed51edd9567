"""Connect the ranks of one machine by sockets: messages take microseconds, and the end of a process is seen at once.

A switch in shared memory sends a few words a round ("ready", "read"), and a collective takes milliseconds on the host.
Unix sockets of whole messages (SOCK_SEQPACKET) carry them; a rank that waits sleeps in `poll`, because there may be
more ranks than cores. They are also the memory barrier between the writer and the reader of shared memory.

Every process of the machine can see and open such a socket. So both ends compare the user of the other end, which the
kernel reports (SO_PEERCRED), with their own, and a rank greets with a secret that the ranks exchanged over their
process group. A connection that fails either is closed; it neither delays the others nor ends the run."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

CONNECT_TIMEOUT_S = 60.0
PIECE_BYTES = 1 << 16
"""Bytes sent at once: less than the smallest default socket buffer of Linux. Longer messages are sent in pieces."""

MAX_MESSAGE_BYTES = 1 << 26
"""Bytes of a whole message; a peer that sends more is disconnected."""

MAX_UNGREETED = 64
"""Connections of this user that have not greeted yet; beyond that the oldest is closed."""

ENDED, MALFORMED = "its process has ended", "it sent a malformed message"
"""Reasons why a peer is closed"""

_BUSY_PAUSE_S = 0.01
_LAST, _MORE = b"\0", b"\1"
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process id, user, group
_GREETING = struct.Struct("<8sI32s")
"""`_HELLO`, the sender's rank, and the receiver's secret"""
_HELLO = b"rlfusion"


def machine() -> tuple[str, ...]:
    """Return what is equal for two processes that can reach each other's sockets and memory: one kernel, the same
    namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, str(os.getuid()), os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")


def is_trusted(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user or to root."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (0, os.geteuid())


class Invitation(NamedTuple):
    """Let a rank connect to a `Listener`. Sent over the process group only: ``secret`` (hexadecimal) must not be
    readable by other users, whereas everyone on the machine can list ``address``."""

    address: str
    secret: str


class Listener:
    """Accept the connections of peers from the moment it is made. ``invitation``: what they need to connect."""

    def __init__(self) -> None:
        # An abstract address leaves nothing on disk, however the rank ends.
        self.invitation = Invitation(f"\0rlfusion-{secrets.token_hex(16)}", secrets.token_hex(32))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(self.invitation.address)
        self.socket.listen(1024)
        self.socket.setblocking(False)

    def close(self) -> None:
        self.socket.close()

    def connect(self, rank: int, invitations: Mapping[int, Invitation], timeout_s: float | None = None) -> PeerSockets:
        """Connect this rank with every other one, given all invitations by rank. Collective over them; close the
        listener.
        ``timeout_s``: to wait for each of them; None: CONNECT_TIMEOUT_S.
        Raise TimeoutError: a rank did not connect in time.
        Raise ConnectionError: the address of a rank belongs to a process of another user."""
        deadline = time.monotonic() + (CONNECT_TIMEOUT_S if timeout_s is None else timeout_s)
        sockets: dict[int, socket.socket] = {}
        try:
            for peer, invitation in invitations.items():
                if peer < rank:
                    sockets[peer] = _call(rank, peer, invitation, deadline)
            self._accept(sockets, {peer for peer in invitations if peer > rank}, deadline)
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
        finally:
            self.close()
        return PeerSockets(sockets)

    def _accept(self, sockets: dict[int, socket.socket], missing: set[int], deadline: float) -> None:
        """Add the connections of the ``missing`` ranks to ``sockets``. Never waits for a single connection, since
        other processes may connect and send nothing."""
        ungreeted: dict[int, socket.socket] = {}
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        try:
            while missing:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"ranks {sorted(missing)} of this machine did not connect in time")
                for fd, _ in poll.poll(left_s * 1e3):
                    if fd == self.socket.fileno():
                        if (connection := self._next_caller()) is not None:
                            ungreeted[connection.fileno()] = connection
                            poll.register(connection, select.POLLIN)
                    elif (connection := ungreeted.pop(fd, None)) is not None:
                        poll.unregister(fd)
                        if (peer := self._greeted_by(connection, missing)) is None:
                            connection.close()
                        else:
                            sockets[peer] = connection
                            missing.remove(peer)
                    if len(ungreeted) > MAX_UNGREETED:
                        fd, connection = next(iter(ungreeted.items()))
                        poll.unregister(ungreeted.pop(fd))
                        connection.close()
        finally:
            for connection in ungreeted.values():
                connection.close()

    def _next_caller(self) -> socket.socket | None:
        """Accept a connection; return None if it is of another user, or has gone."""
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        if not is_trusted(connection):
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def _greeted_by(self, connection: socket.socket, missing: set[int]) -> int | None:
        """Return the rank of the ``missing`` that has greeted over a connection; None if none of them did."""
        try:
            greeting = connection.recv(_GREETING.size + 1)
        except OSError:
            return None
        if len(greeting) != _GREETING.size:
            return None
        hello, peer, secret = _GREETING.unpack(greeting)
        own = bytes.fromhex(self.invitation.secret)
        return peer if hello == _HELLO and hmac.compare_digest(secret, own) and peer in missing else None


class PeerSockets:
    """A socket to each of some ranks. ``closed``: why a peer can no longer be reached, by rank; `ENDED` if its process
    has ended or closed its socket."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.closed: dict[int, str] = {}
        self._sockets = sockets
        self._peer_of = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._partial = {peer: bytearray() for peer in sockets}
        self._received: list[tuple[int, bytes]] = []
        self._poll = select.poll()
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message; drop it if the peer is closed. Receives while the peer's buffer is full, as the peer may be
        sending to this rank.
        Raise ValueError: the message has more than MAX_MESSAGE_BYTES."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes to rank {peer}: expected at most {MAX_MESSAGE_BYTES}")
        for start in range(0, len(message), PIECE_BYTES):
            stop = start + PIECE_BYTES
            self._send(peer, (_MORE if stop < len(message) else _LAST) + message[start:stop])

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return (peer, message) of what has arrived; wait until something does, or a peer closes."""
        if not self._received:
            self._poll_once(timeout_s)
        received, self._received = self._received, []
        return received

    def disconnect(self, peer: int, reason: str) -> None:
        """Receive nothing more from a peer, and send it nothing more."""
        if peer not in self.closed:
            self.closed[peer] = reason
            self._poll.unregister(self._sockets[peer])

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def __del__(self) -> None:
        self.close()

    def _send(self, peer: int, piece: bytes) -> None:
        while peer not in self.closed:
            try:
                self._sockets[peer].send(piece)
                return
            except BlockingIOError:
                self._poll.modify(self._sockets[peer], select.POLLIN | select.POLLOUT)
                self._poll_once(1.0)
                if peer not in self.closed:
                    self._poll.modify(self._sockets[peer], select.POLLIN)
            except (BrokenPipeError, ConnectionResetError):
                return  # what it sent before is still to be received, then its end

    def _poll_once(self, timeout_s: float) -> None:
        """Receive one piece from every peer that has sent one."""
        for fd, events in self._poll.poll(max(0.0, timeout_s) * 1e3):
            peer = self._peer_of[fd]
            if events == select.POLLOUT:
                continue
            try:
                piece = self._sockets[peer].recv(PIECE_BYTES + 2)
            except ConnectionResetError:
                continue  # it ended with messages unread; what it sent before is still to come, then its end
            if not piece:
                self.disconnect(peer, ENDED)
            else:
                self._take(peer, piece)

    def _take(self, peer: int, piece: bytes) -> None:
        """Add a piece to its peer's message."""
        mark, partial = piece[:1], self._partial[peer]
        partial += piece[1:]
        if mark not in (_LAST, _MORE) or len(piece) > PIECE_BYTES + 1 or len(partial) > MAX_MESSAGE_BYTES:
            partial.clear()
            self.disconnect(peer, MALFORMED)
        elif mark == _LAST:
            self._received.append((peer, bytes(partial)))
            partial.clear()


def _call(rank: int, peer: int, invitation: Invitation, deadline: float) -> socket.socket:
    """Connect to a peer, and greet it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        while not _has_connected(connection, invitation.address):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {peer} of this machine did not accept a connection in time")
            time.sleep(_BUSY_PAUSE_S)
        if not is_trusted(connection):
            raise ConnectionError(f"the socket of rank {peer} belongs to a process of another user")
        connection.send(_GREETING.pack(_HELLO, rank, bytes.fromhex(invitation.secret)))
    except BaseException:
        connection.close()
        raise
    return connection


def _has_connected(connection: socket.socket, address: str) -> bool:
    """Connect; return False if the listener's queue of connections is full."""
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        return False
    return True
