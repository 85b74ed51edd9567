"""Log-probabilities tile by tile: equal to those of whole logits, to the bit where there is one tile, in little memory.

Hidden states and weights are multiples of 1/4, so that every logit is exact in bfloat16 whatever order a product sums
in: what remains is what tiles add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fusion.costmodel.memory import logprob_bytes
from fusion.model import Head, Mesh, ModelConfig, Parallel
from fusion.model.id_mask import IdMask
from fusion.model.tiling import TILE_BYTES, tile_shape
from fusion.training.batch import KeptIds
from fusion.training.logprobs import vocab_parallel_logprobs
from tests.helpers import TINY, run_ranks
from tests.training.whole_logprobs import whole_logprobs


class Case(NamedTuple):
    """A micro-batch, and how its logits are cut."""

    rows: int
    vocabulary: int  # of each of two TP ranks
    channels: int
    cuts: int  # blocks of the head of a rank
    tile_bytes: int
    temperature: float = 1.0
    keeps: bool = False
    masks: bool = False
    half: bool = False
    row_multiple: int = 1
    seed: int = 0


CASES = st.builds(
    Case,
    rows=st.integers(0, 9),
    vocabulary=st.integers(3, 11),
    channels=st.integers(1, 5),
    cuts=st.integers(1, 3),
    tile_bytes=st.integers(1, 400),
    temperature=st.sampled_from([1.0, 0.7]),
    keeps=st.booleans(),
    masks=st.booleans(),
    half=st.booleans(),
    row_multiple=st.sampled_from([1, 4]),
    seed=st.integers(0, 9),
)


def inputs_of(case: Case, parts: int = 1, part: int = 0, device: Any = "cpu"):
    """Hidden states and the head of one of ``parts`` of the vocabulary, with gradients; targets and kept ids."""
    random = torch.Generator().manual_seed(case.seed)
    dtype, num_ids = torch.bfloat16 if case.half else torch.float32, 2 * case.vocabulary

    def quarters(*shape: int) -> torch.Tensor:
        return (torch.randint(-6, 7, shape, generator=random) / 4).to(dtype)

    hidden, weight = quarters(case.rows, case.channels), quarters(num_ids, case.channels)
    targets = torch.randint(num_ids - 2, (case.rows,), generator=random)
    sets = [
        {int(t), *torch.randint(num_ids - 2, (size % 5,), generator=random).tolist()} for size, t in enumerate(targets)
    ]
    sets = [sorted(ids) if index % 4 else [] for index, ids in enumerate(sets)]
    kept = KeptIds(
        torch.tensor([len(ids) for ids in sets], dtype=torch.int64),
        torch.tensor([id for ids in sets for id in ids], dtype=torch.int64),
    )
    own = range(part * num_ids // parts, (part + 1) * num_ids // parts)
    config = replace(
        ModelConfig.from_hf({**TINY, "model_type": "qwen3", "vocab_size": num_ids}), masked_ids=MASKED(num_ids)
    )
    blocks = [
        block.clone().to(device).requires_grad_() for block in weight[own.start : own.stop].tensor_split(case.cuts)
    ]
    head = Head(blocks, IdMask(config, own, device) if case.masks else None, case.row_multiple)
    return hidden.to(device).requires_grad_(), head, targets.to(device), kept if case.keeps else None


def MASKED(num_ids: int) -> tuple[tuple[int, int], ...]:
    """The last two ids, which no target or kept id is."""
    return ((num_ids - 2, num_ids),)


def values_and_gradients(case: Case, values: Any, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    weights = torch.arange(1.0, case.rows + 1, device=hidden.device)
    ((weights * values.logprobs).sum() + 0.3 * (weights.flip(0) * values.entropy).sum()).backward()
    gradients = [hidden.grad, torch.cat([block.grad for block in head.blocks])]
    assert all(gradient.dtype == hidden.dtype for gradient in gradients)
    return [value.detach().cpu() for value in values if value is not None] + [one.cpu() for one in gradients]


class WatchedHead(Head):
    """Keeps the gradients of its logits."""

    def logits_of(self, *args: Any, **options: Any) -> torch.Tensor:
        self.computed = super().logits_of(*args, **options)
        self.computed.retain_grad()
        return self.computed


def whole(case: Case, device: Any = "cpu") -> list[torch.Tensor]:
    hidden, head, targets, kept = inputs_of(case, device=device)
    values = whole_logprobs(hidden, head, targets, temperature=case.temperature, kept=kept, with_mass=True)
    return values_and_gradients(case, values, hidden, head)


def tiled(case: Case, mesh: Mesh, device: Any = "cpu") -> list[torch.Tensor]:
    hidden, head, targets, kept = inputs_of(case, mesh.parallel.tp, mesh.tp_rank, device)
    options = dict(temperature=case.temperature, kept=kept, with_mass=True, tile_bytes=case.tile_bytes)
    return values_and_gradients(case, vocab_parallel_logprobs(hidden, head, targets, mesh, **options), hidden, head)


def assert_close(found: list[torch.Tensor], case: Case) -> None:
    """Values are those of whole logits to 1e-6. Gradients are sums over logits. In float32 those of logits are sums of
    `terms_of_logits`, which are as exact as x - log Z: logits of at most 16 and log Z are rounded by 2^-24 of them, on
    both sides, so gradients are equal to 64 x 2^-24 of the terms' magnitudes. In bfloat16 gradients of logits, sums of
    a tile and totals are rounded, by 2^-9 each."""
    hidden, head, targets, kept = inputs_of(case)
    head = WatchedHead(head.blocks, head.mask, head.row_multiple)
    values = whole_logprobs(hidden, head, targets, temperature=case.temperature, kept=kept, with_mass=True)
    wanted = values_and_gradients(case, values, hidden, head)
    for value, other in zip(found[:-2], wanted[:-2], strict=True):
        torch.testing.assert_close(value, other, atol=2e-6, rtol=1e-6)
    of_logits = head.computed.grad.float().abs() if case.half else terms_of_logits(case, head.computed, targets, wanted)
    weight = torch.cat(head.blocks).detach().float().abs()
    magnitudes = of_logits @ weight, of_logits.T @ hidden.detach().float().abs()
    for gradient, other, magnitude in zip(found[-2:], wanted[-2:], magnitudes, strict=True):
        assert gradient.dtype == other.dtype
        error = (gradient.float() - other.float()).abs()
        assert (error <= (1e-2 * magnitude + 1e-6 if case.half else 4e-6 * magnitude)).all()


def terms_of_logits(
    case: Case, logits: torch.Tensor, targets: torch.Tensor, values: list[torch.Tensor]
) -> torch.Tensor:
    """Sum the magnitudes of the terms of the gradient of each logit [n, ids], which may cancel: with p = 1 for the
    target nothing of the first two is left. Those of logits that are not kept are counted, too."""
    x, (logprobs, entropy) = logits.detach() / case.temperature, values[:2]
    logp = x - (x.gather(1, targets.unsqueeze(1)) - logprobs.unsqueeze(1))
    p, is_target = logp.exp().clamp(max=1.0), torch.nn.functional.one_hot(targets, x.shape[1])
    weights = torch.arange(1.0, case.rows + 1).unsqueeze(1)
    of_entropy = (p * (logp.abs() + entropy.unsqueeze(1))).nan_to_num()  # of masked ids: 0 x inf
    return (weights * (is_target + p) + 0.3 * weights.flip(0) * of_entropy) / case.temperature


@given(CASES)
@example(Case(rows=4, vocabulary=6, channels=4, cuts=1, tile_bytes=1, temperature=0.7, seed=4))
def test_tiles_give_what_whole_logits_give(case: Case) -> None:
    assert_close(tiled(case, Mesh.single()), case)


@given(CASES)
def test_one_tile_gives_the_same_bits(case: Case) -> None:
    case = case._replace(tile_bytes=TILE_BYTES)
    for found, wanted in zip(tiled(case, Mesh.single()), whole(case), strict=True):
        assert torch.equal(found, wanted)


SPLIT = [
    Case(9, 11, 5, 1, 64),
    Case(9, 11, 5, 2, 100, temperature=0.7, keeps=True, masks=True),
    Case(7, 8, 3, 3, 33, keeps=True, half=True),
    Case(8, 9, 4, 2, 16, masks=True, half=True, row_multiple=4, temperature=0.7),
    Case(5, 6, 2, 1, TILE_BYTES, keeps=True, masks=True),
    Case(0, 6, 2, 2, 20, keeps=True, masks=True),
]


def tiled_over_tp(rank: int, device: Any) -> list[list[torch.Tensor]]:
    mesh = Mesh.create(Parallel(2, tp=2))
    return [tiled(case, mesh, device.torch_device) for case in SPLIT]


@pytest.mark.parametrize("tile_bytes", [TILE_BYTES, 4 * 8 * 16])
def test_the_backward_pass_computes_logits_again_only_where_they_are_several_tiles(tile_bytes: int) -> None:
    computed = []

    class Counted(Head):
        def logits_of(self, *args: Any, **options: Any) -> torch.Tensor:
            computed.append(1)
            return super().logits_of(*args, **options)

    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    targets = torch.arange(8)
    values = vocab_parallel_logprobs(hidden, Counted([weight]), targets, Mesh.single(), tile_bytes=tile_bytes)
    num_tiles = len(computed)
    loss = values.logprobs.sum()
    gradients = [torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2)]
    assert (num_tiles, len(computed)) == ((1, 2) if tile_bytes == TILE_BYTES else (2, 6)), "the second time always"
    assert all(map(torch.equal, *gradients))


def test_tiles_of_a_vocabulary_split_over_tp_give_the_same() -> None:
    for case, left, right in zip(SPLIT, *run_ranks(tiled_over_tp, 2), strict=True):
        *values, of_hidden, of_head = left
        *others, of_hidden_too, of_head_too = right
        assert all(map(torch.equal, values, others))
        found = [*values, of_hidden.float() + of_hidden_too.float(), torch.cat([of_head, of_head_too])]
        assert_close([*found[:-2], found[-2].to(of_hidden.dtype), found[-1]], case)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**9))
def test_a_tile_is_within_its_bytes_and_whole_logits_are_one_where_they_fit(
    rows: int, ids: int, tile_bytes: int
) -> None:
    row_chunk, num_ids = tile_shape(rows, ids, tile_bytes)
    assert row_chunk >= 1 and num_ids >= 1 and 4 * min(rows, row_chunk) * num_ids <= max(tile_bytes, 4)
    if 4 * rows * ids <= tile_bytes:
        assert row_chunk >= rows and num_ids == ids


def test_tiles_of_a_large_micro_batch_are_aligned_and_neither_narrow_nor_flat() -> None:
    assert tile_shape(16384, 151936) == (4096, 16384)
    assert tile_shape(16384, 151936 // 8) == (4096, 16384)
    assert all(size % 64 == 0 for size in tile_shape(3000, 151936))
    assert tile_shape(1 << 20, 64) == (1 << 20, 64)


@pytest.mark.parametrize("half", [False, True])
def test_memory_is_that_of_a_tile_whatever_the_micro_batch(device: Any, half: bool) -> None:
    """Peak bytes beyond hidden states and head are those of the estimate; of 1,024 rows whole logits would take 117
    MB."""
    peaks = []
    for rows in (256, 1024):
        case = Case(rows, 4096, 8, 2, 1 << 21, half=half, masks=True)
        hidden, head, targets, _ = inputs_of(case, device=device.torch_device)
        before = device.memory().allocated
        device.reset_peak()
        values = vocab_parallel_logprobs(
            hidden, head, targets, Mesh.single(), with_mass=True, tile_bytes=case.tile_bytes
        )
        (values.logprobs.sum() + values.entropy.sum()).backward()
        peaks.append(device.memory().peak_allocated - before)
        wide = 0 if half else 2 * 8 * (rows + 8192)  # gradients that the estimate takes for bfloat16
        planned = logprob_bytes(rows, 8192, 8, case.tile_bytes) + wide
        assert 0.7 * planned <= peaks[-1] <= 1.15 * planned
    assert peaks[1] < 1.1 * peaks[0], "four times the rows"
