"""Serve one folder of the KV pool from another node of a local Ray cluster, for `kv_pool.py`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import KVServer
from stalesync.cards.kv_servers import RayPeer

STORE_BYTES = 512 << 20


@contextmanager
def remote_peer(spec: KVPoolSpec, root: Path) -> Iterator[RayPeer]:
    """Runs a server of ``root`` on a second node: objects reach this process from there over a connection between the
    stores of two raylets."""
    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    try:
        node = cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        remote: Any = ray.remote
        server = remote(num_cpus=0)(KVServer).options(scheduling_strategy=place).remote(spec, root)
        yield RayPeer(node.node_id, ray.get(server.boot.remote()), server)
    finally:
        ray.shutdown()
        cluster.shutdown()


def wire_s(nbytes: int, repeats: int = 20) -> float:
    """Returns the least seconds in which as many bytes pass a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    content, buffer, seconds = bytes(nbytes), bytearray(nbytes), []
    with sender, receiver:
        for _ in range(repeats):
            began = time.perf_counter()
            sending = threading.Thread(target=sender.sendall, args=(content,))
            sending.start()
            view = memoryview(buffer)
            while view.nbytes:
                view = view[receiver.recv_into(view) :]
            seconds.append(time.perf_counter() - began)
            sending.join()
    return min(seconds)
