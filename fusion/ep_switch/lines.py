"""Sockets between the ranks of one machine: a word in microseconds, and the end of a process at once.

A switch in shared memory has a few words a round to say ("ready", "read"), and a collective takes milliseconds on the
host. Unix sockets of whole messages (SOCK_SEQPACKET) carry them; who waits, sleeps in `poll`, because there may be more
ranks than cores. They are also the memory barrier between who wrote shared memory and who reads it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
from collections.abc import Mapping

MEETING_TIMEOUT_S = 60.0
PIECE_BYTES = 1 << 16
"""What is sent at once: less than the smallest default socket buffer of Linux. Longer messages go in pieces."""

_LAST, _MORE = b"\0", b"\1"


def machine() -> tuple[str, ...]:
    """Equal for two processes if they can reach each other's sockets and memory: one kernel, the same name spaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, str(os.getuid()), os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")


class Door:
    """Where a rank can be called: listens from the moment it is made, at `address`."""

    def __init__(self) -> None:
        self.address = f"\0rlfusion-{secrets.token_hex(16)}"  # abstract: nothing is left on disk, however we end
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(MEETING_TIMEOUT_S)
        self.socket.bind(self.address)
        self.socket.listen(1024)

    def close(self) -> None:
        self.socket.close()

    def meet(self, rank: int, addresses: Mapping[int, str]) -> Lines:
        """One line to every other rank, given everyone's address. Collective over them; closes the door.

        Raises:
            TimeoutError: some rank did not call within a minute.
        """
        lines: dict[int, socket.socket] = {}
        try:
            for peer in addresses:
                if peer < rank:
                    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    line.settimeout(MEETING_TIMEOUT_S)
                    line.connect(addresses[peer])
                    # Whoever knows the address of the rank it calls, and of itself, is of the group.
                    line.send(pickle.dumps((addresses[rank], rank)))
                    lines[peer] = line
            callers = {pickle.dumps((address, peer)): peer for peer, address in addresses.items() if peer > rank}
            while len(lines) < len(addresses) - 1:
                line, _ = self.socket.accept()
                line.settimeout(MEETING_TIMEOUT_S)
                caller = callers.get(line.recv(PIECE_BYTES))
                if caller is not None:  # a stranger of this machine is not listened to
                    lines[caller] = line
        except BaseException:
            for line in lines.values():
                line.close()
            raise
        finally:
            self.close()
        return Lines(lines)


class Lines:
    """A line to each of some ranks. ``gone``: those whose process has ended, or closed its line."""

    def __init__(self, lines: dict[int, socket.socket]) -> None:
        self.gone: set[int] = set()
        self._lines = lines
        self._peer_of = {line.fileno(): peer for peer, line in lines.items()}
        self._begun = dict.fromkeys(lines, b"")
        self._heard: list[tuple[int, bytes]] = []
        self._poll = select.poll()
        for line in lines.values():
            line.setblocking(False)
            self._poll.register(line, select.POLLIN)

    def tell(self, peer: int, message: bytes) -> None:
        """Sends a message; to one that is gone, nothing. Listens while the peer's buffer is full: the peer may be
        telling us something at the time."""
        for start in range(0, len(message), PIECE_BYTES):
            stop = start + PIECE_BYTES
            self._send(peer, (_MORE if stop < len(message) else _LAST) + message[start:stop])

    def hear(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """(peer, message) of what was said; waits until somebody has said something, or goes."""
        if not self._heard:
            self._listen(timeout_s)
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def __del__(self) -> None:
        self.close()

    def _send(self, peer: int, piece: bytes) -> None:
        while peer not in self.gone:
            try:
                self._lines[peer].send(piece)
                return
            except BlockingIOError:
                self._poll.modify(self._lines[peer], select.POLLIN | select.POLLOUT)
                self._listen(1.0)
                if peer not in self.gone:
                    self._poll.modify(self._lines[peer], select.POLLIN)
            except (BrokenPipeError, ConnectionResetError):
                return  # what it said before it went is still to be heard; then comes the end

    def _listen(self, timeout_s: float) -> None:
        """Takes one piece of everyone who has sent one."""
        for fd, events in self._poll.poll(max(0.0, timeout_s) * 1e3):
            peer = self._peer_of[fd]
            if events == select.POLLOUT:
                continue
            try:
                piece = self._lines[peer].recv(PIECE_BYTES + 1)
            except ConnectionResetError:
                continue  # it went without hearing us out; what it said before that comes yet, then its end
            if not piece:
                self.gone.add(peer)
                self._poll.unregister(fd)
                continue
            self._begun[peer] += piece[1:]
            if piece[:1] == _LAST:
                self._heard.append((peer, self._begun[peer]))
                self._begun[peer] = b""
