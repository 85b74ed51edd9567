"""Name hosts, and ranks in messages: "rank 3 on host-b (10.0.0.2)" where the cards are on several hosts. Pure.

Addresses are those that Ray knows, under which its processes reach each other. The name of a host resolves to nothing
useful: `/etc/hosts` may map it to 127.0.1.1."""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Host:
    """A host of the Ray cluster. ``node``: Ray's id of it; ``name``: its host name; ``address``: its IP address."""

    node: str
    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach its address."""
        return ipaddress.ip_address(self.address).is_loopback


def all_hosts(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Host]:
    """Return the hosts of `ray.nodes()` by Ray's id, also those that have left the cluster."""
    return {
        node["NodeID"]: Host(node["NodeID"], name=node["NodeManagerHostname"], address=node["NodeManagerAddress"])
        for node in nodes
    }


def alive_hosts(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Host]:
    return all_hosts([node for node in nodes if node["Alive"]])


def number_hosts(hosts: Sequence[Host]) -> list[int]:
    """Number the host of each rank, in order of appearance."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def describe_hosts(hosts: Iterable[Host]) -> str:
    """Return "host-a (10.0.0.1) and host-b (10.0.0.2)"."""
    return " and ".join(sorted(map(str, hosts)))


def describe_ranks(ranks: Iterable[int], hosts: Sequence[Host] = ()) -> str:
    """Return "rank 1 and rank 4"; "rank 1 on host-a (10.0.0.1) and rank 4 on host-b (10.0.0.2)" where ``hosts``, the
    host of every rank, are several."""
    if len({*hosts}) < 2:
        return " and ".join(f"rank {rank}" for rank in sorted(ranks))
    by_host = groupby(sorted(ranks), key=lambda rank: hosts[rank])
    return " and ".join(f"{describe_ranks(there)} on {host}" for host, there in by_host)
