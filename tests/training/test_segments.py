"""Sums of sequences are exact to rounding, and to the bit independent of what a sequence is packed with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.training.corrections import mask_sequence, tis_sequence
from fusion.training.loss import LossInput, means_of_sequences, sums_of_sequences
from fusion.training.segments import Segments
from tests.atomic_additions import AtomicAdditions
from tests.host_reads import HostReads

SIZES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=12)


def values_of(sizes: list[int], seed: int, *channels: int) -> list[torch.Tensor]:
    """Numbers of very different sizes, of which no order of additions gives the same sum as another."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, *channels, generator=random) * 10 ** torch.randn(size, *channels, generator=random)
        for size in sizes
    ]


@given(SIZES, st.integers(0, 99), st.sampled_from([(), (3,)]), st.data())
def test_any_packing_gives_the_same_bits(sizes: list[int], seed: int, channels: tuple[int, ...], data: Any) -> None:
    values = values_of(sizes, seed, *channels)
    alone = [Segments([len(one)], "cpu").sums(one)[0] for one in values]
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    for part in (order[:cut], order[cut:]):
        if part:
            sums = Segments([sizes[i] for i in part], "cpu").sums(torch.cat([values[i] for i in part]))
            assert torch.equal(sums, torch.stack([alone[i] for i in part]))


@given(SIZES, st.integers(0, 99))
def test_sums_are_exact_to_rounding(sizes: list[int], seed: int) -> None:
    """The error of a sum of n terms is at most that of log2 n roundings of the sum of magnitudes."""
    values = values_of(sizes, seed)
    sums = Segments(sizes, "cpu").sums(torch.cat(values))
    for one, total in zip(values, sums.tolist(), strict=True):
        depth = math.ceil(math.log2(max(2, len(one))))
        assert abs(total - math.fsum(one.tolist())) <= depth * 2**-24 * float(one.double().abs().sum()) * 1.001


@pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, math.nan])
def test_what_is_not_a_number_stays_in_its_sequence(value: float) -> None:
    sums = Segments([1, 0, 3], "cpu").sums(torch.tensor([value, 1.0, 2.0, 4.0]))
    assert sums[1:].tolist() == [0.0, 7.0] and torch.equal(sums[:1].view(torch.int32), bits(value))


def bits(value: float) -> torch.Tensor:
    return torch.tensor([value]).view(torch.int32)


@given(SIZES, st.integers(0, 99))
def test_gradients_are_those_of_sums_and_means(sizes: list[int], seed: int) -> None:
    values, weights = (torch.cat(values_of(sizes, seed + i)).double().requires_grad_() for i in range(2))
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    same = (owner.unsqueeze(1) == owner).double()
    for of_sequences, matrix in ((sums_of_sequences, same), (means_of_sequences, same / same.sum(1, keepdim=True))):
        found = of_sequences(values, sizes)
        torch.testing.assert_close(found, matrix @ values)
        (gradient,) = torch.autograd.grad((found * weights.detach()).sum(), values)
        # means divide behind the sum, so that their gradient is one of sums, too
        torch.testing.assert_close(gradient, matrix.t() @ weights.detach())


def corrected(values: list[torch.Tensor], device: Any) -> list[torch.Tensor]:
    logprobs = torch.cat(values).to(device)
    zeros = torch.zeros_like(logprobs)
    tokens = LossInput(logprobs, zeros, [len(one) for one in values], behaviour_logprobs=zeros)
    return [correct(tokens).weight.cpu() for correct in (tis_sequence, mask_sequence)]


@given(SIZES, st.integers(0, 99), st.randoms(use_true_random=False))
def test_corrections_of_sequences_do_not_depend_on_their_micro_batch(sizes: list[int], seed: int, random: Any) -> None:
    values = [one.clamp(-1, 1) * 0.1 for one in values_of(sizes, seed)]
    order = random.sample(range(len(sizes)), len(sizes))
    together = [weights.split(sizes) for weights in corrected(values, "cpu")]
    packed = [weights.split([sizes[i] for i in order]) for weights in corrected([values[i] for i in order], "cpu")]
    for one, other in zip(together, packed, strict=True):
        assert all(torch.equal(one[i], other[place]) for place, i in enumerate(order))


def test_a_card_adds_in_order_and_is_not_waited_for(device: Any) -> None:
    sizes, card = [5, 0, 3, 1], device.torch_device
    values = torch.cat(values_of(sizes, 1)).to(card).requires_grad_()
    with AtomicAdditions() as added, HostReads() as reads:
        found = means_of_sequences(values, sizes)
        (found * found.detach()).sum().backward()
    assert not added.seen and not reads.found and not reads.sent


def test_additions_by_index_are_found(device: Any) -> None:
    """What the tests of repeatability rest on."""
    card = device.torch_device
    x, index = torch.tensor([0.5, 0.25, 1.5]).to(card).requires_grad_(), torch.tensor([0, 1, 0]).to(card)
    for add, name in (
        (lambda: x.new_zeros(2).index_add(0, index, x), "index_add"),
        (lambda: x.new_zeros(2).scatter_add(0, index, x), "scatter_add"),
        (lambda: x.new_zeros(2).scatter_reduce(0, index, x, "sum"), "scatter_reduce"),
        (lambda: x.new_zeros(2).index_put((index,), x, accumulate=True), "index_put"),
        (lambda: (x[index] * x).sum().backward(), "index_put"),
        (lambda: (x.gather(0, index) * x).sum().backward(), "scatter_add"),
        (lambda: (x.index_select(0, index) * x).sum().backward(), "index_add"),
        (lambda: index.bincount(x.detach()), "bincount"),
        (lambda: x.cumsum(0), "cumsum"),
    ):
        with AtomicAdditions() as added:
            add()
        assert [one.split()[0].lstrip("_").replace("_impl", "") for one in added.found] == [name]
    with AtomicAdditions() as added:
        x.new_zeros(2).index_add(0, index, torch.ones_like(x))
        x.new_zeros(3).index_add(0, torch.tensor([2, 1, 0]).to(card), x)
        x.new_zeros(2).scatter_reduce(0, index, x, "amax")
        x.unsqueeze(0).cumsum(0), torch.stack([x, x]).cumsum(1)
    assert not added.found and len(added.seen) == 2
