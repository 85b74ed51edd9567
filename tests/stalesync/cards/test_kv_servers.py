"""Pools of two machines, folders of their own on this one, that exchange KV through a real Ray."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from distqueue.payload.sweep import memory
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import KVServer, PeerGone, PeerLate, RemotePools
from stalesync.cards.servers import RayPeer, kv_servers, remote_pools
from tests.machine import patience, wait_for
from tests.rollout.kv_pool.test_files import KEY, ROUTING, kv, opened, park, paths
from tests.rollout.kv_pool.test_remote import fetch
from tests.rollouts import rollout_config
from tests.warm import use_ray

NBYTES = 8 << 20


class Server(KVServer):
    def pid(self):
        return os.getpid()


@pytest.fixture
def pools():
    """The store of a machine, another machine's view of its server, and the server's process."""
    use_ray()
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        server = ray.remote(num_cpus=0)(Server).remote(KVPoolSpec("run"), Path(folder))
        boot, pid = ray.get([server.boot.remote(), server.pid.remote()])
        yield opened(Path(folder)), RayPeer("there", boot, server), pid, Path(folder)
        ray.kill(server)


def object_bytes():
    """Bytes of Ray objects on this node."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def test_kv_travels_as_an_object_that_is_freed_with_its_last_reference(pools):
    one, peer, _, root = pools
    views = RemotePools("run", {0: [peer]})
    views.observe_prefill(1, patience(60))
    (source,) = views.of(0)
    before = object_bytes()
    for seed in range(3):
        assert park(one, KEY, kv(seed, NBYTES), routing=ROUTING)
        found = source.find(KEY)
        content = torch.empty(found.kv_bytes, dtype=torch.uint8)
        routing = torch.empty_like(ROUTING)
        found.read(content, routing.view(-1).view(torch.uint8))
        assert object_bytes() >= before + NBYTES
        found.close()
        assert torch.equal(content, kv(seed, NBYTES)) and torch.equal(routing, ROUTING)
        assert not paths(root) and fetch(source) is None
        wait_for(lambda: object_bytes() <= before, 20)


def test_a_server_that_hangs_is_not_awaited_and_one_that_has_ended_is_gone(pools):
    one, peer, pid, _ = pools
    name = one._file_names.file(KEY)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PeerLate):
            peer.take(name, 0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert peer.take(name, patience(60)) is None
    assert park(one)
    assert np.asarray(peer.take(name, patience(60))).nbytes > 4096
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerGone, match="there"):
        peer.take(name, patience(60))


def test_on_one_machine_no_server_is_started():
    use_ray()
    spec = SimpleNamespace(kv_pool=KVPoolSpec("run"), rollout=rollout_config(suspended="pool"), engines=[(0,)])
    with kv_servers(spec) as peers:
        assert peers is None and remote_pools(spec, 0, ()) is None


def test_a_rank_asks_the_machines_of_an_engine_but_not_its_own():
    spec = SimpleNamespace(kv_pool=KVPoolSpec("run"), engines=[(0, 1), (2, 3), (4, 5)])
    peers = [RayPeer(machine, "boot", None) for machine in "aababc"]
    pools = remote_pools(spec, 0, peers)
    assert [[pool._peer.machine for pool in pools.of(engine)] for engine in range(4)] == [[], ["b"], ["b", "c"], []]
    assert [[pool._peer.machine for pool in remote_pools(spec, 2, peers).of(engine)] for engine in range(3)] == [
        ["a"], ["a"], ["c"]
    ]  # fmt: skip
