"""Checksums of boxes and of runs on the wire: equal to sums of Python's integers, without a value beyond int64."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.ep_switch import checksum as on_wire
from fusion.ep_switch.checksum import ROW, run_sums
from fusion.model import box_checksum as module
from fusion.model.box_checksum import CHUNK, MODULUS, PRIMES, WIDTH, as_halves, box_checksum, factors, num_halves

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def random_bits(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-128, 128, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator).to(torch.int8)
    return bits.view(dtype)


def by_hand(view, name, region):
    """Add up a matrix, halves times factors, in integers of any size; its name's factor is that of a sum of ones."""
    rows, columns = (factors(dim, *span).tolist() for dim, span in enumerate(region))
    one = box_checksum(torch.ones(1, 1, dtype=torch.uint8), name, ((0, 1), (0, 1)))
    residues = []
    for i, prime in enumerate(PRIMES):
        first = factors(0, 0, 1)[i, 0].item() * factors(1, 0, 1)[i, 0].item()
        halves = as_halves(view.contiguous()).view(*view.shape, -1).tolist()
        elements = [[sum(half << 16 * k for k, half in enumerate(of)) for of in row] for row in halves]
        total = sum(x * r * c for row, r in zip(elements, rows[i], strict=True)
                    for x, c in zip(row, columns[i], strict=True))  # fmt: skip
        residues.append(total * one * pow(first, -1, prime) % prime)
    return residues


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_the_sum_of_bits_times_weights(dtype):
    view, region = random_bits((5, 7), dtype), ((3, 8), (1000, 1007))
    value = box_checksum(view, "a", region)
    assert [value % prime for prime in PRIMES] == by_hand(view, "a", region) and 0 <= value < MODULUS
    assert value != box_checksum(view, "b", region) != box_checksum(view, "b", ((4, 9), region[1]))


@given(st.data())
def test_sums_of_boxes_add_up_and_every_change_of_an_element_or_exchange_changes_them(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole, cuts = (
        random_bits(shape, dtype, data.draw(st.integers(0, 99))),
        [data.draw(st.integers(0, n)) for n in shape],
    )

    def total(values):
        parts = [((), ())]
        for n, cut in zip(shape, cuts, strict=True):
            parts = [
                (slices + (slice(*span),), region + (span,))
                for slices, region in parts
                for span in ((0, cut), (cut, n))
            ]
        return sum(box_checksum(values[slices], "w", region) for slices, region in parts) % MODULUS

    before = total(whole)
    assert before == box_checksum(whole, "w", tuple((0, n) for n in shape))
    flat = whole.contiguous().view(-1).clone()
    i, j = (data.draw(st.integers(0, flat.numel() - 1)) for _ in range(2))
    exchanged = flat.clone()
    exchanged[[i, j]] = exchanged[[j, i]]
    same = torch.equal(exchanged.view(torch.uint8), flat.view(torch.uint8))
    assert (total(exchanged.view(shape)) == before) == same
    flat.view(torch.uint8)[i * dtype.itemsize] ^= data.draw(st.integers(1, 255))
    assert total(flat.view(shape)) != before


def test_exchanged_boxes_of_equal_sums_change_the_sum():
    """A sum whose weights were added up from those of rows and columns would not notice it."""
    matrix = torch.tensor([[1, 2, 3], [3, 2, 1], [5, 5, 5]], dtype=torch.int16)
    region = ((0, 3), (0, 3))
    assert box_checksum(matrix, "w", region) != box_checksum(matrix[[1, 0, 2]], "w", region)
    assert box_checksum(matrix, "w", region) != box_checksum(matrix[:, [2, 1, 0]], "w", region)
    halves = [box_checksum(matrix[:1], name, ((0, 1), (0, 3))) for name in ("a", "b")]
    others = [box_checksum(matrix[1:2], name, ((0, 1), (0, 3))) for name in ("b", "a")]
    assert sum(halves) % MODULUS != sum(others) % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [-(1 << 15), (1 << 15) - 1])
def test_the_largest_halves_with_the_largest_weights_stay_within_int64(dtype, half, monkeypatch):
    """Weights are at most prime - 1: with all of them so large, every product and sum must equal Python's."""
    split = num_halves(dtype)
    most = torch.tensor(PRIMES).unsqueeze(1) - 1
    constant = lambda dim, start, stop, num_halves=1: most.expand(2, (stop - start) * num_halves)  # noqa: E731
    monkeypatch.setattr(module, "factors", constant)
    monkeypatch.setattr(on_wire, "factors", constant)
    per_row = 2 * WIDTH // split
    value = 255 if dtype == torch.uint8 else half
    wire = as_halves(torch.zeros(3 * per_row, dtype=dtype)).fill_(value).view(dtype)
    got = box_checksum(wire.view(3, per_row), "w", ((0, 3), (0, per_row)))
    name = box_checksum(torch.ones(1, 1, dtype=torch.uint8), "w", ((0, 1), (0, 1)))
    assert [got % p for p in PRIMES] == [value * 3 * per_row * split * name % p for p in PRIMES], "(-1)(-1) = 1"
    ends = [1, per_row - 1, per_row, 3 * per_row]
    expected = [(stop - start) * split * value for start, stop in zip([0, *ends], ends, strict=False)]
    sums = run_sums(wire, ends).tolist()
    assert [[s % PRIMES[0], s // PRIMES[0]] for s in sums] == [[e % p for p in PRIMES] for e in expected]


@given(st.data())
def test_sums_of_runs_depend_on_their_own_elements_alone(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 3, 40, 5000]), min_size=1, max_size=6))
    ends = list(accumulate(sizes))
    wire = random_bits((ends[-1],), dtype) if ends[-1] else torch.empty(0, dtype=dtype)
    before = run_sums(wire, ends)
    alone = [run_sums(wire[:end], ends[: i + 1])[-1] for i, end in enumerate(ends) if len(wire[:end]) >= ROW]
    assert all(sums.item() in before for sums in alone)
    if not len(wire):
        return
    i = data.draw(st.integers(0, len(wire) - 1))
    changed = wire.clone()
    changed.view(torch.uint8)[i * dtype.itemsize] ^= 1
    differs = (run_sums(changed, ends) != before).tolist()
    assert differs == [end - size <= i < end for end, size in zip(ends, sizes, strict=True)]


def test_runs_that_end_on_either_side_of_a_row_are_summed_by_the_same_weights():
    wire = random_bits((2 * CHUNK + 20 * ROW + 17,), torch.bfloat16)
    whole = run_sums(wire, [len(wire)])
    cuts = [ROW - 1, ROW, ROW + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, len(wire)]
    parts = run_sums(wire, cuts).tolist()
    for i, prime in enumerate(PRIMES):
        digits = [(s // PRIMES[0] if i else s % PRIMES[0]) for s in [*parts, *whole.tolist()]]
        assert sum(digits[:-1]) % prime == digits[-1]
