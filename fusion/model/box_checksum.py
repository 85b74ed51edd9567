"""Compute checksums of weights that do not depend on the layout.

    checksum of a box = Σ over its elements  bits(element) · weight(global tensor, global index)   mod MODULUS

``weight`` is a product of factors, one of the tensor's name and one of the index in each dimension, none of them zero.
The sum is computed modulo two primes, of which MODULUS is the product.

Invariants: a changed element of up to 4 bytes always changes the sum, as its bits change by less than MODULUS. Any
other change, such as exchanged elements or boxes, changes it except with a probability of at most 2^-59: the sum is a
polynomial of degree at most 4 in the factors, modulo each prime (Schwartz, Journal of the ACM 27, 1980). The sums of
boxes add up, mod MODULUS, to the sum of the tensor, however it is cut. No product and no sum exceeds int64: not every
card defines what it does then."""

import hashlib
from functools import lru_cache

import numpy as np
import torch

from fusion.model.boxes import Box

PRIMES = (3037000493, 3037000453)
"""The two largest primes below 2^31.5: a product of two residues fits int64"""

MODULUS = PRIMES[0] * PRIMES[1]

WIDTH = 1 << 16
"""Halves that are summed between two reductions: each is below 2^15, and its weight below 2^31.5"""

CHUNK = 1 << 18
"""Elements summed at once: bounds the int64 temporaries to a few MB"""


def box_checksum(view: torch.Tensor, name: str, region: Box) -> int:
    """Compute the checksum of the elements ``region`` of the global tensor ``name``, from 0 to MODULUS - 1. ``view``:
    the elements in the global orientation, any dtype of 1, 2, 4 or 8 bytes; the sum is over its bits."""
    assert tuple(view.shape) == tuple(stop - start for start, stop in region)
    region = ((0, 1),) * (2 - len(region)) + region
    view = view.detach().reshape([stop - start for start, stop in region])
    leading = torch.ones(2, 1, dtype=torch.int64)
    for dim, (start, stop) in enumerate(region[:-1]):
        leading = (leading.unsqueeze(-1) * factors(dim, start, stop).unsqueeze(1) % _BY_PRIME.unsqueeze(-1)).flatten(1)
    columns = factors(len(region) - 1, *region[-1], num_halves=num_halves(view.dtype)).to(view.device)
    leading, totals = leading.to(view.device), [torch.zeros((), dtype=torch.int64, device=view.device)] * 2
    rows, inner = max(1, CHUNK // max(1, view[:1].numel())), leading.shape[1] // max(1, view.shape[0])
    for row in range(0, view.shape[0], rows):
        halves = as_halves(view[row : row + rows].contiguous()).flatten(0, -2)
        outer = leading[:, row * inner : (row + rows) * inner]
        for start in range(0, halves.shape[1], WIDTH):
            piece = halves[:, start : start + WIDTH]
            for i, prime in enumerate(PRIMES):
                sums = piece.to(torch.int64).mul_(columns[i, start : start + WIDTH]).sum(1) % prime
                totals[i] = totals[i] + (sums * outer[i] % prime).sum()
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return _combined([int(total) * (digest % (prime - 1) + 1) for total, prime in zip(totals, PRIMES, strict=True)])


def num_halves(dtype: torch.dtype) -> int:
    """Return how many integers `as_halves` makes of an element."""
    return max(1, dtype.itemsize // 2)


def as_halves(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor [..., n] as int16 [..., n · `num_halves`], of single bytes as uint8."""
    return values.view(torch.uint8 if values.element_size() == 1 else torch.int16)


@lru_cache(maxsize=64)
def factors(dim: int, start: int, stop: int, num_halves: int = 1) -> torch.Tensor:
    """Return a factor from 1 to prime - 1 of every index of a dimension, int64 [2, stop - start] by prime, on the host.
    ``num_halves``: of each element, the halves' own: 2^16 times as much for each further one."""
    index = np.arange(start, stop, dtype=np.uint64) + (np.uint64(dim + 1) << np.uint64(48))
    mixed = [_mixed(index + (np.uint64(i + 1) << np.uint64(56))) % np.uint64(p - 1) for i, p in enumerate(PRIMES)]
    powers = [torch.from_numpy(np.stack(mixed).astype(np.int64)) + 1]
    for _ in range(num_halves - 1):
        powers.append((powers[-1] << 16) % _BY_PRIME)
    return torch.stack(powers, dim=-1).flatten(1)


def _mixed(index: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers (splitmix64); NumPy's unsigned products wrap by definition."""
    z = index * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _combined(residues: list[int]) -> int:
    """Return the number below MODULUS with these residues (Chinese remainder theorem)."""
    (first, second), (a, b) = PRIMES, residues
    return a % first + first * ((b - a % first) * pow(first, -1, second) % second)


_BY_PRIME = torch.tensor(PRIMES).unsqueeze(1)
