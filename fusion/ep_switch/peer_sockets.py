"""Connects the ranks of one machine by sockets: messages take microseconds, and the end of a process is seen at once.

A switch in shared memory sends a few words a round ("ready", "read"), and a collective takes milliseconds on the host.
Unix sockets of whole messages (SOCK_SEQPACKET) carry them; a rank that waits sleeps in `poll`, because there may be
more ranks than cores. They are also the memory barrier between the writer and the reader of shared memory.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
from collections.abc import Mapping

CONNECT_TIMEOUT_S = 60.0
PIECE_BYTES = 1 << 16
"""Bytes sent at once: less than the smallest default socket buffer of Linux. Longer messages are sent in pieces."""

_LAST, _MORE = b"\0", b"\1"


def machine() -> tuple[str, ...]:
    """Returns what is equal for two processes that can reach each other's sockets and memory: one kernel, the same
    namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, str(os.getuid()), os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")


class Listener:
    """Accepts the connections of peers at `address`, from the moment it is made."""

    def __init__(self) -> None:
        self.address = f"\0rlfusion-{secrets.token_hex(16)}"  # abstract: leaves nothing on disk, however the rank ends
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(CONNECT_TIMEOUT_S)
        self.socket.bind(self.address)
        self.socket.listen(1024)

    def close(self) -> None:
        self.socket.close()

    def connect(self, rank: int, addresses: Mapping[int, str]) -> PeerSockets:
        """Connects this rank with every other one, given all addresses by rank. Collective over them; closes the
        listener.

        Raises:
            TimeoutError: a rank did not connect within CONNECT_TIMEOUT_S.
        """
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in addresses:
                if peer < rank:
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    connection.connect(addresses[peer])
                    # A process that knows its own address and that of its peer is of the group.
                    connection.send(_greeting(addresses[rank], rank))
                    sockets[peer] = connection
            greetings = {_greeting(address, peer): peer for peer, address in addresses.items() if peer > rank}
            while len(sockets) < len(addresses) - 1:
                connection, _ = self.socket.accept()
                connection.settimeout(CONNECT_TIMEOUT_S)
                sender = greetings.get(connection.recv(PIECE_BYTES))
                if sender is not None:  # other processes of this machine are ignored
                    sockets[sender] = connection
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
        finally:
            self.close()
        return PeerSockets(sockets)


class PeerSockets:
    """A socket to each of some ranks. ``closed``: the peers whose process has ended, or closed its socket."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.closed: set[int] = set()
        self._sockets = sockets
        self._peer_of = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._partial = dict.fromkeys(sockets, b"")
        self._received: list[tuple[int, bytes]] = []
        self._poll = select.poll()
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)

    def send(self, peer: int, message: bytes) -> None:
        """Sends a message; drops it if the peer is closed. Receives while the peer's buffer is full, as the peer may be
        sending to this rank."""
        for start in range(0, len(message), PIECE_BYTES):
            stop = start + PIECE_BYTES
            self._send(peer, (_MORE if stop < len(message) else _LAST) + message[start:stop])

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Returns (peer, message) of what has arrived; waits until something does, or a peer closes."""
        if not self._received:
            self._poll_once(timeout_s)
        received, self._received = self._received, []
        return received

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
        """Receives one piece from every peer that has sent one."""
        for fd, events in self._poll.poll(max(0.0, timeout_s) * 1e3):
            peer = self._peer_of[fd]
            if events == select.POLLOUT:
                continue
            try:
                piece = self._sockets[peer].recv(PIECE_BYTES + 1)
            except ConnectionResetError:
                continue  # it ended with messages unread; what it sent before is still to come, then its end
            if not piece:
                self.closed.add(peer)
                self._poll.unregister(fd)
                continue
            self._partial[peer] += piece[1:]
            if piece[:1] == _LAST:
                self._received.append((peer, self._partial[peer]))
                self._partial[peer] = b""


def _greeting(address: str, rank: int) -> bytes:
    return json.dumps([address, rank]).encode()
