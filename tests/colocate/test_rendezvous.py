"""The cards of a machine meet at an address that nobody outside it reaches."""

from __future__ import annotations

import os
import socket

import pytest

from fusion.colocate.rendezvous import LOOPBACK, Rendezvous, interface_of, join, new_group
from tests.helpers import processes
from tests.machine import patience
from tests.sockets import Listening, listening


def _meet(pipe, rank, world, host):
    import torch
    import torch.distributed as dist

    opened = Rendezvous(host) if rank == 0 else None
    pipe.send(opened and opened.address)
    join(pipe.recv(), rank=rank, world=world, opened=opened)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=dist.new_group(backend="cpu:gloo"))
    half = dist.new_group([0, 1], backend="cpu:gloo")
    dist.all_reduce(total, group=half)
    pipe.send((int(total), sorted(listening(os.getpid()))))
    pipe.recv()
    dist.destroy_process_group()


def _own_address():
    """Of this machine in its network; None: it has none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.parametrize("on_a_cluster", [False, True])
def test_the_store_and_gloo_listen_on_the_address_of_the_rendezvous_only(on_a_cluster):
    world, host = 2, _own_address() if on_a_cluster else LOOPBACK
    if host is None:
        pytest.skip("this machine has no network")
    pipes, started = [], []
    for rank in range(world):
        pipe, there = processes().Pipe()
        started.append(processes().Process(target=_meet, args=(there, rank, world, host), daemon=True))
        started[-1].start()
        there.close()
        pipes.append(pipe)
    try:
        address, _ = (_answer(pipe) for pipe in pipes)
        for pipe in pipes:
            pipe.send(address)
        answers = [_answer(pipe) for pipe in pipes]
        assert [total for total, _ in answers] == [6, 6]
        port = int(address.split(":")[2].split("/")[0])
        assert Listening("tcp", host, port) in answers[0][1], "the store"
        for _, opened in answers:
            assert {one.address for one in opened if one.kind == "tcp"} == {host}, "also gloo's"
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"\x80\x04\x95" + bytes(100))  # neither executed nor fatal
        for pipe in pipes:
            pipe.send("end")
    finally:
        for process in started:
            process.join(patience(20))
            process.kill()
    assert [process.exitcode for process in started] == [0, 0]


def _lose_the_last(pipe, rank, again):
    """Ranks 0 and 1 keep a group of theirs; rank 2 ends, and other processes take its place (``again``)."""
    import torch
    import torch.distributed as dist

    def add(group):
        total = torch.tensor([rank + 1])
        dist.all_reduce(total, group=group)
        return int(total)

    opened = Rendezvous(LOOPBACK) if rank == 0 else None
    pipe.send(opened and opened.address)
    join(pipe.recv(), rank=rank, world=3, opened=opened)
    kept = None if again else dist.new_group([0, 1], backend="cpu:gloo")
    everyone = None if again else dist.new_group([0, 1, 2], backend="cpu:gloo")
    pipe.send(everyone and add(everyone))
    while (name := pipe.recv()) != "end":
        if everyone is not None:
            dist.destroy_process_group(everyone)
        assert new_group([0, 1] if rank == 2 else [2], "others", "cpu:gloo") is None, "of which it is no member"
        everyone = new_group([0, 1, 2], name, "cpu:gloo")
        members = dist.get_process_group_ranks(everyone)
        pipe.send((add(everyone), members, kept and add(kept)))


def test_a_process_takes_the_place_of_one_that_has_ended_in_new_groups_and_others_stay_as_they_are():
    def start(rank, again=False):
        pipe, there = processes().Pipe()
        process = processes().Process(target=_lose_the_last, args=(there, rank, again), daemon=True)
        process.start()
        there.close()
        started.append(process)
        return pipe

    started = []
    try:
        pipes = [start(rank) for rank in range(3)]
        address, *_ = (_answer(pipe) for pipe in pipes)
        for pipe in pipes:
            pipe.send(address)
        assert [_answer(pipe) for pipe in pipes] == [6, 6, 6]
        for name in ("restart 1", "restart 2"):
            started[-1].kill()
            started[-1].join(patience(20))
            pipes[2] = start(2, again=True)
            _answer(pipes[2])
            pipes[2].send(address)
            _answer(pipes[2])
            for pipe in pipes:
                pipe.send(name)
            kept = (6, [0, 1, 2], 3)
            assert [_answer(pipe) for pipe in pipes] == [kept, kept, (6, [0, 1, 2], None)]
        for pipe in pipes:
            pipe.send("end")
    finally:
        for process in started:
            process.join(patience(20))
            process.kill()


def _answer(pipe):
    assert pipe.poll(patience(60))
    return pipe.recv()


@pytest.mark.parametrize("address", ["", "nowhere://", "tcp://127.0.0.1:80", "tcp://127.0.0.1/key", "tcp://:80/key"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT/KEY"):
        join(address, rank=1, world=2)


def test_every_rendezvous_has_its_own_port_and_key():
    addresses = {Rendezvous(LOOPBACK).address for _ in range(2)}
    assert len({address.rsplit("/", 1)[1] for address in addresses}) == 2


def test_the_interface_of_an_address_is_found():
    assert interface_of(LOOPBACK) == "lo" and interface_of("203.0.113.7") is None
