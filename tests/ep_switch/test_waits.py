"""Each wait of a switch in place, taken away, is a failing switch on cards whose streams are late. (`fill` has its own,
in test_fill.py.)"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusion.ep_switch import plan_switch
from fusion.ep_switch.exchange_shared import SharedExchange
from fusion.ep_switch.opening import open_exchange
from fusion.ep_switch.outcome import Stopwatch
from fusion.ep_switch.transfer import Switcher
from fusion.model import Parallel
from tests.ep_switch.switching import BUCKET, End, assert_filled, build_pair, execute
from tests.helpers import run_ranks, tiny_config

CONFIG = tiny_config(num_hidden_layers=4, tie_word_embeddings=False)
PATIENT = SimpleNamespace(synchronize=lambda: None)


def settle_at_once(self, index):
    self._sent.pop(index)


def open_without_stream(self, program, checksum, honest=SharedExchange.open):
    honest(self, program, checksum)
    self._stream = PATIENT


class Hasty:
    """A device the first stream of which does not wait the first time it is told to."""

    def __init__(self, device):
        self._device, self._told = device, 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def current_stream(self):
        stream = self._device.current_stream()
        self._told += 1
        return SimpleNamespace(synchronize=self._second(stream.synchronize)) if self._told == 1 else stream

    def _second(self, wait):
        calls = iter((lambda: None, wait))
        return lambda: next(calls)()


def run_at_once(self, checksum=False, honest=Switcher.run):
    self.device = Hasty(self.device)
    return honest(self, checksum)


MUTANTS = {
    "a sender frees what has been read": (SharedExchange, "settle", settle_at_once),
    "a reader has read when its card has": (SharedExchange, "open", open_without_stream),
    "a switch begins when its weights are there": (Switcher, "run", run_at_once),
}


def is_filled(target):
    try:
        assert_filled(target, via=torch.float32)
    except AssertionError:
        return False
    return True


def switched(rank, device, name):
    """Whether the target is filled: all on a stream of one's own, where copies are late; the weights come late, too."""
    if name:
        kind, method, mutant = MUTANTS[name]
        honest = getattr(kind, method)
        setattr(kind, method, mutant)
    ends = [End(Parallel(2, 2), (0, 1)).layout(CONFIG), End(Parallel(1), (2,)).layout(CONFIG)]
    try:
        with device.on_stream(device.new_stream()):
            source, target = build_pair(*ends, device)
            flats = source.weights.flats if source else []
            hosts = [device.host_empty(flat.shape, flat.dtype).copy_(flat) for flat in flats]
            for flat in flats:
                flat.zero_()
            open_exchange(
                device, None, kind="shared", clock=Stopwatch(device)
            )  # the ranks meet, which waits for everything
            device.synchronize()
            for flat, host in zip(flats, hosts, strict=True):
                flat.copy_(host, non_blocking=True)
            execute(plan_switch(*ends, BUCKET), source, target, device=device, exchange="shared")
            device.synchronize()
            return is_filled(target)
    finally:
        if name:
            setattr(kind, method, honest)


def test_with_all_its_waits_a_switch_is_right():
    assert run_ranks(switched, 3, None, device="adversarial") == [True] * 3


@pytest.mark.parametrize("name", MUTANTS)
def test_without_one_it_is_not(name):
    assert False in run_ranks(switched, 3, name, device="adversarial")
