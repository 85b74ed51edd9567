"""KV of other machines: what was parked there, to the bit, once; or nothing."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory
from fusion.inference.pooled import KVDamaged
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.pull import RETRY_EVERY
from fusion.rollout.kv_pool.remote import KVServer, PeerGone, PeerLate
from tests.rollout.kv_pool.peers import direct_peers, pools_of
from tests.rollout.kv_pool.test_files import KEY, OTHER, ROUTING, kv, opened, park, paths


@pytest.fixture
def roots():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        made = [Path(folder) / str(number) for number in range(2)]
        for root in made:
            root.mkdir()
        yield made


def fetch(source, key=KEY, routing=None):
    """What a reader gets; None: it finds nothing."""
    found = source.find(key)
    if found is None:
        return None
    with closing(found):
        content = torch.empty(found.kv_bytes, dtype=torch.uint8)
        buffer = torch.empty(0, dtype=torch.uint8) if routing is None else torch.empty_like(routing)
        found.read(content, buffer.view(-1).view(torch.uint8))
        return content, buffer


def test_another_machine_gives_what_was_parked_there_once(roots):
    one = opened(roots[0])
    (source,) = pools_of(direct_peers(roots, KVPoolSpec("run")), here=1).of(0)
    assert park(one, routing=ROUTING)
    content, routing = fetch(source, routing=ROUTING)
    assert torch.equal(content, kv()) and torch.equal(routing, ROUTING)
    assert fetch(source) is None and not paths(roots[0]), "it was taken out"
    assert park(one), "the next chunk of the request"
    found = source.find(KEY)
    assert (found.computed, found.kv_bytes, found.routing) == (39, 4096, ())
    found.close()
    one.forget([KEY.request])
    assert one.nbytes == 0


def test_what_is_on_disk_there_is_found_and_what_is_forgotten_there_is_not(roots):
    spill = roots[0] / "disk"
    one = opened(roots[0], max_memory_bytes=4096, spill=str(spill))
    other = replace(KEY, request="g1/1")
    assert park(one) and park(one, other, kv(1)) and paths(spill)
    peers = direct_peers(roots, KVPoolSpec("run", spill=str(spill)))
    (source,) = pools_of(peers, here=1).of(0)
    assert torch.equal(fetch(source)[0], kv()) and not paths(spill)
    one.forget(["g1/1"])
    assert fetch(source, other) is None and len(peers[0].asked) == 2


@pytest.mark.parametrize("other", OTHER, ids=["shard", "request", "version", "tokens", "length"])
def test_kv_of_anything_else_is_not_found_and_not_served_under_its_name(roots, other):
    one = opened(roots[0])
    assert park(one)
    (source,) = pools_of(direct_peers(roots, KVPoolSpec("run")), here=1).of(0)
    assert fetch(source, other) is None
    (path,) = paths(roots[0])
    path.rename(path.with_name(one._file_names.file(other)))
    with pytest.raises(KVDamaged, match="another"):
        fetch(source, other)


@settings(max_examples=100)
@given(st.data())
def test_no_flipped_bit_and_no_other_length_is_served(data):
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        roots = [Path(folder)] * 2
        one = opened(roots[0])
        assert park(one, routing=ROUTING)
        (path,) = paths(roots[0])
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        else:
            length = data.draw(st.integers(0, len(content) + 99).filter(lambda length: length != len(content)))
            content = content[:length].ljust(length, b"\0")
        path.write_bytes(content)
        (source,) = pools_of(direct_peers(roots, KVPoolSpec("run")), here=1).of(0)
        with pytest.raises(KVDamaged):
            fetch(source, routing=ROUTING)


def test_a_server_gives_files_of_its_user_and_run_only(roots):
    one = opened(roots[0])
    assert park(one)
    (path,) = paths(roots[0])
    assert KVServer(KVPoolSpec("another"), roots[0]).take(path.name) is None
    server = KVServer(KVPoolSpec("run"), roots[0])
    for name in ("", "../" * 8 + "etc/passwd", f"../files/{path.name}", path.name[:-1], path.name.upper()):
        with pytest.raises(ValueError, match="40 hexadecimal digits"):
            server.take(name)
    path.chmod(0o640)
    assert server.take(path.name) is None and path.exists()
    path.chmod(0o600)
    target = path.rename(roots[0] / "elsewhere")
    path.symlink_to(target)
    assert server.take(path.name) is None and target.exists()


def test_a_machine_that_is_late_is_left_alone_and_one_that_is_gone_is_not_asked_again(roots, caplog):
    peers = direct_peers(roots, KVPoolSpec("run"))
    pools = pools_of(peers, here=1, prefill_s_per_token=1e-9)
    (source,) = pools.of(0)
    peers[0].fails = PeerLate("machine-0")
    assert [fetch(source) for _ in range(RETRY_EVERY + 1)] == [None] * (RETRY_EVERY + 1)
    assert len(peers[0].asked) == 2, "again after some requests"
    peers[0].fails = PeerGone("machine-0 has ended")
    (source,) = pools_of(peers, here=1).of(0)
    assert [fetch(source) for _ in range(2 * RETRY_EVERY)] == [None] * (2 * RETRY_EVERY)
    assert len(peers[0].asked) == 3
    (record,) = caplog.records
    assert "machine-0 has ended" in record.message
    assert not any(isinstance(arg, Exception) for arg in record.args), "its frames would keep the card's memory"


def test_nothing_is_fetched_before_it_is_known_what_computing_takes(roots):
    one, peers = opened(roots[0]), direct_peers(roots, KVPoolSpec("run"))
    assert park(one)
    pools = pools_of(peers, here=1, prefill_s_per_token=None)
    (source,) = pools.of(0)
    assert fetch(source) is None and not peers[0].asked
    pools.observe_prefill(100, 3.0)
    assert torch.equal(fetch(source)[0], kv())


VERSIONS, REQUESTS = 3, 4


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_two_machines_never_serve_kv_of_another_version_request_or_with_wrong_bytes(random):
    """Random moves between two machines, new weights, and damage: what is served is what was parked last for just
    this; what was not is not served; and in the end nothing is left."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        roots = [Path(folder) / str(number) for number in range(2)]
        for root in roots:
            root.mkdir()
        stores = [opened(root) for root in roots]
        peers = direct_peers(roots, KVPoolSpec("run"))
        sources = [pools_of(peers, here).of(1 - here)[0] for here in range(2)]
        there, damaged, version, serial = {}, set(), 0, 0
        """(machine, key) → content"""

        def a_key():
            request, of_version = f"r{random.randrange(REQUESTS)}", random.choice([version, max(0, version - 1)])
            return replace(KEY, request=request, version=of_version, num_tokens=40 + random.randrange(2))

        for _ in range(40):
            here, key = random.randrange(2), a_key()
            match random.choice(["park", "park", "pull", "pull", "pull", "forget", "weights", "damage"]):
                case "park" if key.version == version:
                    serial += 1
                    content = kv(serial, 64 + random.randrange(64))
                    assert park(stores[here], key, content)
                    for old in [one for one in there if one[0] == here and one[1].request == key.request]:
                        del there[old]
                        damaged.discard(old)
                    there[here, key] = content
                case "pull":
                    home = 1 - here
                    try:
                        served = fetch(sources[here], key)
                    except KVDamaged:
                        assert (home, key) in damaged
                    else:
                        assert (home, key) not in damaged
                        expected = there.get((home, key))
                        assert (served is None) == (expected is None)
                        assert served is None or torch.equal(served[0], expected)
                    there.pop((home, key), None)
                    damaged.discard((home, key))
                case "forget":
                    stores[here].forget([key.request])
                    for old in [one for one in there if one[0] == here and one[1].request == key.request]:
                        del there[old]
                        damaged.discard(old)
                case "weights":
                    version += 1
                    for store in stores:
                        store.clear()
                    there.clear(), damaged.clear()
                case "damage" if there:
                    where, of = random.choice(sorted(there, key=str))
                    if (where, of) in damaged:
                        continue  # the same bit again would repair it
                    path = next(one for one in paths(roots[where]) if one.name == stores[where]._file_names.file(of))
                    content = bytearray(path.read_bytes())
                    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
                    path.write_bytes(content)
                    damaged.add((where, of))
        for store in stores:
            store.close()
        assert not [path for root in roots for path in root.iterdir()]
