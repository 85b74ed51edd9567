"""What a process listens on, as the kernel lists it in /proc (and `ss -ltnup` prints it)."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

_LISTENING, _UNCONNECTED_UDP = "0A", "07"


class Listening(NamedTuple):
    """``kind``: tcp, udp or unix; ``address``: IP address, or path (abstract ones begin with @)."""

    kind: str
    address: str
    port: int = 0

    @property
    def local(self) -> bool:
        """Whether only processes of this machine reach it."""
        return self.kind == "unix" or ip_address(self.address).is_loopback


def listening(pid: int) -> set[Listening]:
    """Sockets of a process that others can connect to, or send datagrams to."""
    inodes = _socket_inodes(pid)
    return {opened for inode, opened in _all_listening(pid).items() if inode in inodes}


def unix_paths(pid: int) -> set[Path]:
    """Paths of the Unix sockets of a process: those that it listens on, and those of connections that it has accepted,
    whose other ends have no path of their own."""
    inodes, lines = _socket_inodes(pid), []
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    named = (fields for line in lines if len(fields := line.split(maxsplit=7)) == 8 and fields[7].startswith("/"))
    return {Path(fields[7]) for fields in named if fields[6] in inodes}


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    except OSError:  # it has ended
        pass
    return inodes


def _all_listening(pid: int) -> dict[str, Listening]:
    found: dict[str, Listening] = {}
    try:
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == (_LISTENING if kind.startswith("tcp") else _UNCONNECTED_UDP):
                    address, port = fields[1].split(":")
                    found[fields[9]] = Listening(kind[:3], _ip(address), int(port, 16))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and int(fields[3], 16) & 0x10000:  # __SO_ACCEPTCON
                found[fields[6]] = Listening("unix", fields[7])
    except OSError:
        pass
    return found


def _ip(digits: str) -> str:
    """As /proc writes it: words of 4 bytes in the order of the machine."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    address = ip_address(socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data))
    return str(getattr(address, "ipv4_mapped", None) or address)
