"""Whatever is asked for in whatever order, content and places are those of a model that moves nothing."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion.offload import Offloader
from tests.offload.memory import free_bytes

NUMEL = 3000
NAMES = ("a", "b", "c", "d")
OPERATIONS = ("compute", "out", "back", "wait", "wait all", "poll", "allocate")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(NAMES)), max_size=40))
def test_any_order_of_requests_keeps_every_bit(device, requests):
    offloader = Offloader(device, bucket_bytes=4096)
    tensors = {name: torch.full((NUMEL,), 0.0, device=device.torch_device) for name in NAMES}
    expected = dict.fromkeys(NAMES, 0.0)
    away, ready = set(), set(NAMES)  # ready: nothing has to be waited for before use
    for number, (operation, name) in enumerate(requests, start=1):
        if operation == "compute" and name in ready:
            expected[name] += number
            tensors[name].fill_(number) if expected[name] == number else tensors[name].add_(number)
        elif operation == "out" and name not in away:
            offloader.out({name: tensors[name]})
            away.add(name)
            ready.discard(name)
        elif operation == "back" and name in away:
            offloader.back([name])
            away.discard(name)
        elif operation.startswith("wait"):
            names = list(NAMES) if operation == "wait all" else [name]
            offloader.wait(names)
            assert all(tensors[left].untyped_storage().nbytes() == 0 for left in away.intersection(names))
            ready |= set(names) - away
        elif operation == "poll":
            offloader.poll()
        elif operation == "allocate":
            torch.full((NUMEL,), -1.0, device=device.torch_device).add_(1.0)
        assert all(offloader.resident(name) == (name not in away) for name in NAMES)
    offloader.back()
    offloader.wait()
    for name, value in expected.items():
        assert bool((tensors[name].cpu() == value).all()), name
    device.synchronize()
    offloader.poll()
    assert free_bytes(offloader.pool) == offloader.pool.nbytes <= 2 * len(NAMES) * 4 * 4096
