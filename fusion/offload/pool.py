"""Pool pinned host memory, which is allocated once and kept: pinning pages costs more than copying them.

    arena 0, 8 MiB   | exp_avg.0 | exp_avg_sq.0 | master.0 | ░ free ░ |
    arena 1, 2 MiB   | exp_avg.1 | ░ free ░ |

Invariants (property-tested in tests/offload/test_pool.py): regions that are out at the same time share no byte; an
arena is a power of two of bytes, which is what PyTorch's pinning allocators round up to, so `nbytes` is what the host
actually uses; the arenas of one batch are less than twice its bytes; returned regions merge with their free neighbours,
so a batch that is returned and taken again gets the same addresses; the pool never shrinks."""

from collections.abc import Iterable, Sequence

import torch

from fusion.npu import Device

ALIGN = 512
"""Alignment of regions in bytes, for copy engines and so that any dtype may view them."""


class HostPool:
    """Allocate regions of host memory, pinned where the card supports it, for all data that a process offloads."""

    def __init__(self, device: Device):
        self._device = device
        self._arenas: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # by arena: (start, stop) in bytes, ascending, never adjacent
        self._taken: dict[int, tuple[int, int, int]] = {}  # address -> arena, start, stop

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Take regions, uint8 [size] on the host, each contiguous, of undefined content; ``sizes`` in bytes, all > 0.

        Regions of one transfer are best taken together: the largest are placed first, each into the first gap that
        holds it; where there is none, an arena is allocated for all remaining ones.
        Raise RuntimeError: the host has no more memory to pin. Nothing is taken."""
        assert all(size > 0 for size in sizes), f"regions of {list(sizes)} bytes: expected sizes > 0"
        regions: dict[int, torch.Tensor] = {}
        left = sum(map(_aligned, sizes))
        try:
            for index in _largest_first(sizes):
                region = self._place(sizes[index])
                if region is None:
                    self._grow(_aligned(sizes[index]), left)
                    region = self._place(sizes[index])
                    assert region is not None
                regions[index] = region
                left -= _aligned(sizes[index])
        except BaseException:
            self.give(regions.values())
            raise
        return [regions[index] for index in range(len(sizes))]

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return whether `take` needs no new arena."""
        regions = [self._place(sizes[index]) for index in _largest_first(sizes)]
        self.give(region for region in regions if region is not None)
        return all(region is not None for region in regions)

    def give(self, regions: Iterable[torch.Tensor]) -> None:
        """Return regions to the pool; no copy may still read or write them."""
        for region in regions:
            arena, start, stop = self._taken.pop(region.data_ptr())
            gaps = self._free[arena]
            for gap in [gap for gap in gaps if gap[1] == start or gap[0] == stop]:
                gaps.remove(gap)
                start, stop = min(start, gap[0]), max(stop, gap[1])
            gaps.append((start, stop))
            gaps.sort()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the pool holds, in use or not."""
        return sum(arena.numel() for arena in self._arenas)

    def _place(self, nbytes: int) -> torch.Tensor | None:
        """Take a region from the first gap that holds it; None: there is no such gap."""
        size = _aligned(nbytes)
        for arena, gaps in enumerate(self._free):
            for position, (start, stop) in enumerate(gaps):
                if stop - start >= size:
                    gaps[position : position + 1] = [(start + size, stop)] if stop - start > size else []
                    region = self._arenas[arena][start : start + nbytes]
                    self._taken[region.data_ptr()] = arena, start, start + size
                    return region
        return None

    def _grow(self, size: int, left: int) -> None:
        # No larger than the remaining regions fill, unless a single region needs it.
        nbytes = max(1 << (size - 1).bit_length(), 1 << (left.bit_length() - 1))
        self._arenas.append(self._device.host_empty((nbytes,), torch.uint8))
        self._free.append([(0, nbytes)])


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGN
