"""Make the cards of a run meet, at an address that only they are told, to create their process groups.

    first card   open_rendezvous(host)  binds a free port of ``host`` and keeps it
                      │ tcp://HOST:PORT/KEY, through Ray's authenticated calls
    every card   join(address, …)       the first card's store listens on that socket; all meet under KEY

A process that takes the place of one that has ended cannot enter the groups of which that one was a member: torch's
groups keep their members. It meets the first card's store, too, and the ranks that it works with make new groups, under
a name that none has had before (`new_group`):

    restarted card   join(address, …) ─► new_group(ranks, "restart 1") ─┬─ one group
    other cards      no collective is under way ─► new_group(ranks, "restart 1") ─┘

torch's own `tcp://` rendezvous listens on all interfaces, whatever its address says. Here the store listens on ``host``
only: on loopback where all cards are on one machine. torch's store has no authentication: whoever reaches its port can
read and change the addresses of ranks (never execute anything, as no value of it is unpickled), so the network between
hosts must be closed to others (docs/security.md). KEY is random: it keeps processes apart that connect by mistake."""

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

LOOPBACK = "127.0.0.1"
REACHED_WITHIN_S = 30.0
"""Seconds after which a rank without an answer of the first rank's host cannot reach it"""
_SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for the IPv4 address of an interface (netdevice(7))"""


class NotReached(RuntimeError):
    """A rank cannot connect to the first rank."""


class Rendezvous:
    """Hold the bound socket at which the first card's store will listen. ``address``: for `join`, of all cards."""

    def __init__(self, host: str) -> None:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind(place)
        # From now on the kernel accepts connections, before the store serves them; it limits the number to somaxconn.
        self._socket.listen(4096)
        name = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{name}:{self._socket.getsockname()[1]}/{secrets.token_hex(16)}"

    def take_fd(self) -> int:
        """Return the socket's descriptor, which then belongs to the caller."""
        return self._socket.detach()


def join(address: str, *, rank: int, world: int, opened: Rendezvous | None = None) -> None:
    """Make this process ``rank`` of the default process group, at the start of the run or in place of one that has
    ended. The default group sends nothing and opens no connection: it serves to create others, as `new_group` does. The
    first rank must have opened its rendezvous before others join. That is tried first: torch's store would retry for
    half an hour. ``address``: `Rendezvous.address` of rank 0; ``opened``: on rank 0, the rendezvous itself. Raise
    ValueError if ``address`` is not that of a rendezvous, NotReached if this process cannot connect to it."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers torch's backend `fake`

    assert (opened is not None) == (rank == 0), "the first rank opens the rendezvous"
    store = _connect(address, rank=rank, world=world, opened=opened)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)


def new_group(ranks: Sequence[int], name: str, backend: str) -> dist.ProcessGroup | None:
    """Create the process group of ``ranks`` (global ranks, ascending), of which some may have joined later; None on
    other ranks. Collective over its ranks alone, unlike torch's `new_group`, which counts groups and so must be called
    by all ranks as often. ``name``: that no group of the run has had before; the same on all ranks."""
    ranks = list(ranks)
    if dist.get_rank() not in ranks:
        return None
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _connect(address: str, *, rank: int, world: int, opened: Rendezvous | None = None) -> dist.Store:
    """Return the store of the first rank, which listens at ``opened`` there."""
    place = urlsplit(address)
    key = place.path.strip("/")
    if place.scheme != "tcp" or not place.hostname or not place.port or not key:
        raise ValueError(f"rendezvous address {address!r}: expected tcp://HOST:PORT/KEY")
    if rank != 0:
        _check_reached(place.hostname, place.port)
    _bind_collectives(place.hostname, place.port)
    store = dist.TCPStore(
        place.hostname,
        place.port,
        world,
        is_master=rank == 0,
        timeout=c10d.default_pg_timeout,
        master_listen_fd=None if opened is None else opened.take_fd(),
        use_libuv=True,
    )
    return dist.PrefixStore(key, store)


def _check_reached(host: str, port: int) -> None:
    """Connect to the first rank once; raise NotReached if it cannot be reached."""
    try:
        socket.create_connection((host, port), REACHED_WITHIN_S).close()
    except OSError as error:
        raise NotReached(
            f"cannot connect to rank 0 at {host}, port {port}: {error}. The hosts must reach each other on all ports "
            '(docs/security.md, "Between the cards"): is there a firewall between them, or is this not the address of '
            "rank 0 in their common network (ray start --node-ip-address=ADDRESS)?"
        ) from error


def _bind_collectives(host: str, port: int) -> None:
    """Make gloo listen on the interface by which this process reaches ``host``, and NCCL if that is loopback (else it
    may use several interfaces). Settings of the user's environment are kept."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        own = probe.getsockname()[0]
    if name := interface_of(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if own == LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface with an IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
