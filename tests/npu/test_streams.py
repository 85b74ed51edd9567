"""streams=adversarial: right programs stay right to the last bit; one that waits too little sees what was before."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.npu import open_device
from tests import machine
from tests.helpers import run_ranks

N = 4096


@pytest.fixture
def late():
    device = _late_card()
    yield device
    device.synchronize()
    torch.npu.set_device(0)


def _late_card():
    device = open_device("emulated", index=14, capacity_bytes=32 << 20, streams="adversarial")
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    assert device.memory().allocated == 0
    return device


def _full(device, value, shape=(N,)):
    return torch.full(shape, value, device=device.torch_device)


def _pinned(device, value, shape=(N,)):
    return device.host_empty(shape, torch.float32).fill_(value)


@pytest.mark.parametrize("wait", [False, True])
def test_an_offload_is_on_the_host_when_somebody_waited(late, wait):
    state, host, stream = _full(late, 3.0), _pinned(late, 0.0), late.new_stream()
    stream.wait_stream(late.current_stream())
    with late.on_stream(stream):
        host.copy_(state, non_blocking=True)
        done = late.event()
        done.record()
    if wait:
        done.synchronize()
    assert host.eq(3).all().item() == wait
    assert not wait or done.query()


@pytest.mark.parametrize("waiter", ["stream", "event", "device", "blocking copy", "kernel", "query twice"])
def test_every_way_of_waiting_waits(late, waiter):
    state, host, stream = _full(late, 3.0), _pinned(late, 0.0), late.new_stream()
    with late.on_stream(stream):
        host.copy_(state, non_blocking=True)
        event = late.event()
        event.record()
        if waiter == "blocking copy":
            state.cpu()
        elif waiter == "kernel":
            state + 1
    if waiter == "stream":
        stream.synchronize()
    elif waiter == "event":
        event.synchronize()
    elif waiter == "device":
        late.synchronize()
    elif waiter == "query twice":
        assert [event.query(), event.query()] == [False, True]
    assert host.eq(3).all()


def test_what_nobody_ordered_is_not_waited_for(late):
    state, host, stream = _full(late, 3.0), _pinned(late, 0.0), late.new_stream()
    with late.on_stream(stream):
        host.copy_(state, non_blocking=True)
    (state + 1).cpu()
    late.current_stream().synchronize()
    assert host.eq(0).all(), "the default stream knows nothing of the other one"
    late.current_stream().wait_stream(stream)
    assert host.eq(0).all(), "the host was not made to wait"
    (state + 1).cpu()
    assert host.eq(3).all()


@pytest.mark.parametrize("wait", [False, True])
def test_an_upload_is_on_the_card_for_streams_that_waited(late, wait):
    host, state, stream = _pinned(late, 5.0), _full(late, 1.0), late.new_stream()
    stream.wait_stream(late.current_stream())
    with late.on_stream(stream):
        state.copy_(host, non_blocking=True)
    if wait:
        late.current_stream().wait_stream(stream)
    assert (state * 2).eq(10 if wait else 2).all()


@pytest.mark.parametrize("wait", [False, True])
def test_a_pinned_source_is_read_late(late, wait):
    host = _pinned(late, 5.0)
    state = host.to(late.torch_device, non_blocking=True)
    if wait:
        late.current_stream().synchronize()
    host.fill_(6)
    assert state.eq(5 if wait else 6).all()


def test_pageable_memory_and_the_default_stream_are_not_late(late):
    state, pageable = _full(late, 3.0), torch.zeros(N)
    pageable.copy_(state, non_blocking=True)
    assert pageable.eq(3).all(), "a real card too copies through a buffer of its own, and waits"
    other = torch.empty_like(state)
    other.copy_(state, non_blocking=True)
    state.zero_()
    assert other.eq(3).all()
    assert state.to("cpu", non_blocking=True).is_pinned()


@pytest.mark.parametrize("wait", [False, True])
def test_a_copy_on_the_card_is_late_on_another_stream(late, wait):
    source, target, stream = _full(late, 7.0), _full(late, 0.0), late.new_stream()
    stream.wait_stream(late.current_stream())
    with late.on_stream(stream):
        target.copy_(source)
    if wait:
        late.current_stream().wait_stream(stream)
    source.fill_(8)
    late.synchronize()
    assert target.eq(7 if wait else 8).all()


@pytest.mark.parametrize("keeper", [None, "wait", "record_stream", "reference"])
def test_a_block_freed_too_early_is_poison(late, keeper):
    source, host, stream = _full(late, 4.0), _pinned(late, 0.0), late.new_stream()
    stream.wait_stream(late.current_stream())
    with late.on_stream(stream):
        host.copy_(source, non_blocking=True)
    if keeper == "wait":
        late.current_stream().wait_stream(stream)
    elif keeper == "record_stream":
        source.record_stream(stream)
    kept = source if keeper == "reference" else None
    del source
    again = _full(late, 9.0)
    late.synchronize()
    assert host.eq(4).all().item() == (keeper is not None)
    assert again.eq(9).all()
    del kept, again
    assert late.memory().allocated == 0


def test_a_recorded_block_comes_back_when_its_stream_is_done(late):
    block, host, stream = _full(late, 4.0), _pinned(late, 0.0), late.new_stream()
    place = block.data_ptr()
    with late.on_stream(stream):
        host.copy_(block, non_blocking=True)
    block.record_stream(stream)
    del block
    assert torch.empty(N, device=late.torch_device).data_ptr() != place
    stream.synchronize()
    assert torch.empty(N, device=late.torch_device).data_ptr() == place
    hog = torch.empty(late.memory().free, dtype=torch.uint8, device=late.torch_device)
    assert hog.numel() > 31 << 20


def test_running_out_of_memory_waits_for_what_is_held(late):
    big, host, stream = _full(late, 1.0, (5 << 20,)), _pinned(late, 0.0, (5 << 20,)), late.new_stream()
    with late.on_stream(stream):
        host.copy_(big, non_blocking=True)
    big.record_stream(stream)
    del big
    assert _full(late, 2.0, (5 << 20,)).eq(2).all()
    assert host.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_unwritten_and_freed_memory_is_poison(late, dtype):
    def looks_wrong(tensor):
        return tensor.isnan().all() if dtype.is_floating_point else tensor.abs().gt(N).all()

    fresh = torch.empty(N, dtype=dtype, device=late.torch_device)
    assert looks_wrong(fresh)
    fresh.zero_()
    del fresh
    assert looks_wrong(torch.empty(N, dtype=dtype, device=late.torch_device))


def test_an_emptied_storage_comes_back_as_poison(late):
    x = _full(late, 1.0)
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(4 * N)
    assert x.isnan().all()


def test_events_measure_time_and_must_be_complete(late):
    start, end, stream = late.event(timing=True), late.event(timing=True), late.new_stream()
    big, host = _full(late, 1.0, (1 << 20,)), _pinned(late, 0.0, (1 << 20,))
    with late.on_stream(stream):
        start.record()
        host.copy_(big, non_blocking=True)
        end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_an_event_recorded_again_does_not_move_a_wait(late):
    first, second, stream = _pinned(late, 0.0), _pinned(late, 0.0), late.new_stream()
    ones, event = _full(late, 1.0), late.event()
    with late.on_stream(stream):
        first.copy_(ones, non_blocking=True)
        event.record()
        late.current_stream().wait_event(event)
        event.wait(torch.npu.default_stream(14))
        second.copy_(ones, non_blocking=True)
        event.record()
    torch.npu.default_stream(14).synchronize()
    assert first.eq(1).all() and second.eq(0).all()


def test_training_is_the_same_to_the_last_bit(late, card):
    losses = []
    for device in (card, late):
        torch.npu.set_device(device.index)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        model.to(device.torch_device, non_blocking=True)
        optimizer = torch.optim.AdamW(model.parameters())
        side = device.new_stream()
        for step in range(4):
            x_BD = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).pin_memory()
            side.wait_stream(device.current_stream())
            with device.on_stream(side):
                x_BD = x_BD.to(device.torch_device, non_blocking=True)
            device.current_stream().wait_stream(side)
            loss = model(x_BD).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:4] == losses[4:]


def test_modes_do_not_mix_on_a_card_in_use(late):
    held = _full(late, 1.0)
    with pytest.raises(ValueError, match="npu:14 is open in this process .* mode"):
        open_device("emulated", index=14)
    with pytest.raises(ValueError, match="device.streams='lazy': expected one of eager, adversarial"):
        open_device("emulated", index=14, streams="lazy")
    del held


# A random program: copies between tensors of the card and of the host on three streams, and waits between the streams.
PLACES = 6  # the first three on the card
STEPS = st.lists(
    st.tuples(st.integers(0, PLACES - 1), st.integers(0, PLACES - 1), st.integers(0, 2), st.integers(0, 1)),
    min_size=1,
    max_size=25,
)


@given(steps=STEPS)
@settings(max_examples=150)
def test_copies_with_the_waits_they_need_are_as_if_done_one_by_one(steps):
    """Each step copies place `source` to place `target` on one stream (or does arithmetic there), after waiting, by an
    event or by wait_stream, for the streams that touched either place and nothing else."""
    device = _late_card()
    streams = [device.current_stream(), device.new_stream(), device.new_stream()]
    values = [torch.full((3,), float(i)) for i in range(PLACES)]
    expected = [value.clone() for value in values]
    places = [v.to(device.torch_device) if i < 3 else v.pin_memory() for i, v in enumerate(values)]
    touched: list[set[int]] = [set() for _ in places]
    for source, target, stream, kernel in steps:
        for other in sorted((touched[source] | touched[target]) - {stream}):
            if kernel:
                streams[stream].wait_stream(streams[other])
            else:
                streams[stream].wait_event(streams[other].record_event())
        if source >= 3 and target >= 3:  # work of the host
            for other in touched[source] | touched[target]:
                streams[other].synchronize()
        with device.on_stream(streams[stream]):
            places[target].copy_(places[source], non_blocking=True)
            if kernel and target < 3:
                places[target].add_(1)
        expected[target].copy_(expected[source])
        if kernel and target < 3:
            expected[target].add_(1)
        touched[source].add(stream)
        touched[target].add(stream)
    device.synchronize()
    assert [place.tolist() for place in places] == [value.tolist() for value in expected]


RATES = 4 * N / 0.2, 4 * N / 0.1
"""Bytes per second at which N floats take 0.2 s to or from the host, and 0.1 s over the wire"""


@pytest.fixture
def timed():
    device = open_device("emulated", index=5, capacity_bytes=32 << 20, streams="timed", rates=RATES)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    yield device
    device.synchronize()
    torch.npu.set_device(0)


def test_a_timed_copy_takes_the_time_of_its_bytes_beside_other_work(timed):
    state, host, stream = _full(timed, 3.0), _pinned(timed, 0.0), timed.new_stream()
    start = time.perf_counter()
    with timed.on_stream(stream):
        host.copy_(state, non_blocking=True)
    queued_s = time.perf_counter() - start
    time.sleep(0.2)
    stream.synchronize()
    took_s = time.perf_counter() - start
    assert machine.within(queued_s, 0.1), "it is only queued"
    assert took_s >= 0.2 and host.eq(3).all()
    assert machine.within(took_s, 0.35), "what was done meanwhile does not count again"
    assert not timed.can_share


def test_timed_copies_of_a_stream_queue_and_those_of_two_do_not(timed):
    state, hosts = _full(timed, 3.0), [_pinned(timed, 0.0) for _ in range(2)]
    one, other = timed.new_stream(), timed.new_stream()
    for streams, least_s in (((one, one), 0.4), ((one, other), 0.2)):
        start = time.perf_counter()
        for stream, host in zip(streams, hosts, strict=True):
            with timed.on_stream(stream):
                host.copy_(state, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        took_s = time.perf_counter() - start
        assert took_s >= least_s and machine.within(took_s, least_s + 0.15)


def test_a_kernel_waits_for_the_timed_copy_that_its_stream_waits_for(timed):
    state, host, stream = _full(timed, 0.0), _pinned(timed, 5.0), timed.new_stream()
    start = time.perf_counter()
    with timed.on_stream(stream):
        state.copy_(host, non_blocking=True)
    timed.current_stream().wait_stream(stream)
    assert (state + 1).eq(6).all() and time.perf_counter() - start >= 0.2


def _timed_collective(rank, _):
    device = open_device("emulated", index=rank + 4, streams="timed", rates=RATES)
    found = []
    for _ in range(3):
        x = _full(device, float(rank + 1))
        start = time.perf_counter()
        work = torch.distributed.all_reduce(x, async_op=True)
        work.wait()
        queued_s = time.perf_counter() - start
        value = x[0].item()
        found.append((queued_s, time.perf_counter() - start, value))
    return found


def test_a_timed_collective_takes_the_time_of_its_bytes():
    for found in run_ranks(_timed_collective, 2):
        assert all(took_s >= 0.1 and value == 3.0 for _, took_s, value in found)
        assert min(queued_s for queued_s, *_ in found) < 0.1, "the host waits for no bytes"
