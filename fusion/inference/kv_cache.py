"""Hold keys and values, or latents: for every layer a pool of blocks, allocated last and released before training.

    pool of a layer   [parts · blocks, heads, block_size, width]      a head's block is one contiguous matrix

What a token keeps is described by a `KVLayout`. Block b's keys are row b of the pool and its values row b + blocks: one
operation writes or gathers both, and the keys of neighbouring blocks are adjacent. A latent is both, in row b. Token t
of a sequence is in its block ``t // block_size`` at offset ``t % block_size``. A card's table may keep the channels of
latents apart (`Plain.areas`); what is gathered or copied to the host has the shape above on every card. With decode
context parallelism a block is divided over ranks: ``block_size`` above is then `Context.page_size`, of one rank."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from fusion.inference.context import Context
from fusion.inference.kv_layout import KVLayout
from fusion.npu import Device, to_card

WORKSPACE_TOKENS = 8192
"""Tokens of KV that are gathered at a time (at least one sequence)."""

MAX_RUNS = 8
"""Runs of neighbouring blocks up to which each is copied to the card by itself"""


class KVCache:
    """Hold one rank's pools, and the workspace in which a sequence's blocks are gathered, from `allocate` to `release`.

    The workspace is kept allocated, because the pages of a large temporary tensor would be mapped again in every layer.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        layers: int,
        block_size: int,
        device: Device,
        dtype: torch.dtype,
        context: Context | None = None,
    ):
        self.layout, self.layers, self.block_size = layout, layers, block_size
        self.context = context or Context(1, 0, block_size)
        self.page_size = self.context.page_size
        self.device, self.dtype = device, dtype
        self.pools: list[torch.Tensor] = []
        self.blocks = 0
        self.workspace = torch.empty(0)
        self._clean = 0

    @property
    def reads_blocks(self) -> bool:
        """Whether the card's attention over blocks is fused."""
        return self.device.operators.reads_blocks(self.dtype)

    @property
    def needs_block_rows(self) -> bool:
        """Whether the card's attention over blocks reads ``PagedRows.blocks_RB``, as the composed one does."""
        return self.device.operators.needs_block_rows or not self.reads_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        return self.layers * self.page_size * self.layout.elements * self.dtype.itemsize

    def workspace_bytes(self, max_length: int) -> int:
        return self._workspace_blocks(max_length) * self.block_bytes // self.layers

    def _workspace_blocks(self, max_length: int) -> int:
        return max(WORKSPACE_TOKENS // self.block_size, -(-max_length // self.block_size))

    def allocate(self, blocks: int, max_length: int) -> None:
        """Allocate ``blocks`` per pool, and a workspace to gather those of `WORKSPACE_TOKENS`, or of a sequence of
        ``max_length``, at a time; owner "kv"."""
        assert not self.pools
        with self.device.owner("kv"):
            self.blocks = blocks
            self.pools = [self._empty(blocks) for _ in range(self.layers)]
            self.workspace = self._empty(self._workspace_blocks(max_length))
        self._clean = 0

    def _empty(self, blocks: int) -> torch.Tensor:
        shape = self.layout.pool_shape(blocks, self.page_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device.torch_device)

    def release(self) -> None:
        """Release every byte, even under views that are still held."""
        for tensor in (*self.pools, self.workspace):
            tensor.untyped_storage().resize_(0)
        self.pools = []

    def host_shape(self, blocks: int) -> tuple[int, ...]:
        """Return the shape of ``blocks`` blocks of a sequence on the host: [layers, parts · blocks, heads, block_size,
        width], with all of this rank's layers and heads."""
        return self.layers, *self.layout.pool_shape(blocks, self.page_size)

    def copy_out(self, blocks: Sequence[int], host: torch.Tensor) -> None:
        """Queue the copy of a sequence's blocks to ``host``, of `host_shape`: the blocks of a layer are gathered, then
        copied at once."""
        rows = self._rows(blocks)
        room = self.workspace[: len(rows)]
        for pool, layer in zip(self.pools, host, strict=True):
            layer.copy_(self.gather(pool, rows, out=room), non_blocking=True)

    def copy_in(self, host: torch.Tensor, first: int, blocks: Sequence[int]) -> None:
        """Queue the copy of what `copy_out` wrote, from its block ``first`` on, into as many ``blocks``: directly where
        these are few runs, else each layer at once, from the workspace."""
        parts, count = self.layout.parts, len(blocks)
        layers = host.unflatten(1, (parts, -1))[:, :, first : first + count]
        runs = [i for i in range(count) if not i or blocks[i] != blocks[i - 1] + 1]
        if len(runs) <= MAX_RUNS and len(self._areas(self.pools[0])) == 1:
            for pool, layer in zip(self.pools, layers, strict=True):
                for part, kv in zip(pool.split(self.blocks), layer, strict=True):  # both contiguous, as cards want it
                    for start, end in pairwise([*runs, count]):
                        part[blocks[start] : blocks[start] + end - start].copy_(kv[start:end], non_blocking=True)
            return
        rows = self._rows(blocks)
        room = self.workspace[: len(rows)]
        for pool, layer in zip(self.pools, layers, strict=True):
            for part, kv in zip(room.split(count), layer, strict=True):
                part.copy_(kv, non_blocking=True)
            areas = self._areas(pool)
            for area, channels in zip(areas, room.split([area.shape[-1] for area in areas], dim=-1), strict=True):
                area.index_copy_(0, rows, channels)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (from, to)."""
        if not pairs:
            return
        source, target = (self._rows(blocks) for blocks in zip(*pairs, strict=True))
        for pool in self.pools:
            for area in self._areas(pool):
                area.index_copy_(0, target, area.index_select(0, source))

    def gather(self, pool: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows [n, heads, block_size, width] of a pool, with all channels."""
        areas = self._areas(pool)
        if len(areas) == 1:
            return torch.index_select(pool, 0, rows, out=out)
        return torch.cat([area.index_select(0, rows) for area in areas], dim=-1, out=out)

    def _areas(self, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.device.operators.areas(pool, self.layout.latent_width)

    def _rows(self, blocks: Sequence[int]) -> torch.Tensor:
        rows = [part * self.blocks + block for part in range(self.layout.parts) for block in blocks]
        return to_card(torch.tensor(rows), self.device.torch_device)

    def invalidate(self) -> None:
        """Mark the content of the pools as undefined: `clean` zeroes each block before it is used again, as a NaN left
        in it would spread."""
        self._clean = 0

    def clean(self, block: int) -> None:
        """Make the content of all blocks up to this one finite, for any previous content of the memory.

        Attention weighs the unused end of a block with 0, and 0 · NaN is NaN. Pages are first touched here, so a pool
        that is never filled costs no physical memory on a host."""
        if block >= self._clean:
            end = min(self.blocks, max(block + 1, 2 * self._clean))
            for area in (area for pool in self.pools for area in self._areas(pool)):
                area.unflatten(0, (self.layout.parts, self.blocks))[:, self._clean : end].zero_()
            self._clean = end
