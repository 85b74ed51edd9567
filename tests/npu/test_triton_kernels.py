"""The Triton kernels compute what the plain table does: in Triton's interpreter on a host (`bash scripts/test.sh
triton`), compiled where there is a CUDA card."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a card Triton's kernels run in its interpreter only", allow_module_level=True)

from fusion.npu.operators import (  # noqa: E402
    PagedRows,
    Plain,
    triton_attention,  # noqa: E402
)
from fusion.npu.operators.cuda_fused import CudaFused  # noqa: E402

pytestmark = pytest.mark.triton
PLAIN, FUSED = Plain(), CudaFused()
EPS = 1e-6
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""Triton's interpreter multiplies no matrices in bfloat16"""


@pytest.fixture(autouse=True)
def generation():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Gating:
    top_k: int
    normalise: bool = True
    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_scores: str = "best"
    scale: float = 1.0
    plain: bool = True


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-2) -> None:
    """The difference is small beside what is expected, in the norm of all; nothing is left unwritten."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.double(), expected.double()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= error * expected.norm() + 1e-6


@pytest.mark.parametrize("width", [48, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_a_sum(width, dtype):
    x, residual, weight = random(5, width, dtype=dtype), random(5, width, dtype=dtype), random(width, dtype=dtype)
    normed, total = FUSED.add_rms_norm(x, residual, weight, EPS)
    expected, sum_ = PLAIN.add_rms_norm(x, residual, weight, EPS)
    assert_close(total, sum_)
    assert DEVICE == "cpu" or torch.equal(total, sum_)  # the interpreter cuts bfloat16 off instead of rounding it
    assert_close(normed, expected)


@pytest.mark.parametrize("rotated", [16, 24, 64])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_norms_and_rotation(rotated, norms, factors):
    qkv, cos, sin = random(3, 6 + 2 * 2, 64), random(3, 1, rotated, dtype=factors), random(3, 1, rotated, dtype=factors)
    weights = (random(64), random(64)) if norms else (None, None)
    for found, expected in zip(
        FUSED.norm_rope(qkv, *weights, (cos, sin), 2, EPS),
        PLAIN.norm_rope(qkv.float(), *(w if w is None else w.float() for w in weights), (cos, sin), 2, EPS),
        strict=True,
    ):
        assert_close(found, expected.to(found.dtype))


@pytest.mark.parametrize("repeats", [0, 2])
def test_stored_rows(repeats):
    rows, kv_heads, page, blocks, channels = 4, 2, 64, 3, 24
    qkv = random(rows, 3 * kv_heads, channels)
    k, v = random(rows, kv_heads, channels), qkv[:, -kv_heads:]  # a view, as of `norm_rope`
    written = 2 * (rows + repeats) * kv_heads
    slots = torch.randperm(2 * blocks * kv_heads * page)[:written].to(DEVICE)
    repeated = torch.tensor([3, 1][:repeats], device=DEVICE) if repeats else None
    pools = [torch.zeros(2 * blocks, kv_heads, page, channels, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    FUSED.store_kv(pools[0], slots, k, v, repeated)
    PLAIN.store_kv(pools[1], slots, k, v, repeated)
    assert torch.equal(*pools)


def attention(lengths: list[int], heads: int, kv_heads: int, channels: int, page: int, invariant: bool):
    """Return what both tables compute, of blocks in a random order behind which lies what must not be read."""
    width = -(-max(lengths) // page)
    rows, blocks = len(lengths), len(lengths) * width
    pool = random(2 * blocks, kv_heads, page, channels, dtype=HALF)
    table = torch.randperm(blocks)[: rows * width].view(rows, width)
    for row, length in enumerate(lengths):
        last, used = table[row, (length - 1) // page], (length - 1) % page + 1
        pool[last, :, used:] = pool[blocks + last, :, used:] = torch.nan
    q = random(rows, heads, channels, dtype=HALF)
    table = table.to(DEVICE)
    asked = torch.tensor(lengths, device=DEVICE)
    paged = PagedRows(
        table.flatten(), asked, asked, table.to(torch.int32), host_lengths=tuple(lengths), invariant=invariant
    )
    found = FUSED.paged_attention(q, pool, paged, None, channels**-0.5)
    expected = []
    for row, length in enumerate(lengths):
        k, v = (
            part[table[row]].transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1)
            for part in pool.chunk(2)
        )
        scores = torch.einsum("hc,shc->hs", q[row].float(), k) * channels**-0.5
        expected.append(torch.einsum("hs,shc->hc", scores.softmax(-1), v))
    return found, torch.stack(expected).to(q.dtype)


@pytest.mark.parametrize("heads, kv_heads, channels", [(8, 1, 128), (2, 2, 24), (34, 2, 32)])
@pytest.mark.parametrize("invariant", [True, False])
def test_attention_over_blocks(heads, kv_heads, channels, invariant, monkeypatch):
    """Rows of one token, of a whole page and one more, of some splits; with another batch also of one split."""
    monkeypatch.setattr(triton_attention, "PROGRAMS", 16)
    assert_close(*attention([1, 64, 65, 300, 600], heads, kv_heads, channels, 64, invariant))
    assert_close(*attention([130, 7], heads, kv_heads, channels, 128, invariant))


def test_an_invariant_row_does_not_depend_on_the_other_rows():
    q, pool = random(3, 4, 32, dtype=HALF), random(2 * 12, 2, 256, 32, dtype=HALF)
    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    lengths = [500, 1000, 20]

    def attend(rows: list[int]) -> torch.Tensor:
        asked = torch.tensor([lengths[row] for row in rows], device=DEVICE)
        host = tuple(lengths[row] for row in rows)
        paged = PagedRows(table[rows].flatten(), asked, asked, table[rows], host, invariant=True)
        return FUSED.paged_attention(q[rows], pool, paged, None, 0.2)

    whole = attend([0, 1, 2])
    for rows in ([0], [1], [2], [2, 0]):
        assert torch.equal(attend(rows), whole[rows])


@pytest.mark.parametrize("experts, top_k", [(128, 8), (6, 3), (60, 4)])
@pytest.mark.parametrize("normalise", [True, False])
def test_chosen_experts(experts, top_k, normalise):
    logits = random(7, experts, dtype=torch.float32)
    logits[1, :] = 0.25  # all alike: the first ones
    logits[2, 1] = logits[2, 4] = 9.0
    weight, expert = FUSED.gate(logits, Gating(top_k, normalise), None)
    expected_weight, expected = PLAIN.gate(logits, Gating(top_k, normalise), None)
    assert torch.equal(expert[[0, *range(3, 7)]], expected[[0, *range(3, 7)]])
    assert expert[1].tolist() == list(range(top_k)) and expert[2, :2].tolist() == [1, 4]
    assert expert.dtype == torch.int64
    assert_close(weight, expected_weight, 1e-5)


@pytest.mark.parametrize("rows, k, experts", [(1, 1, 1), (5, 3, 6), (210, 5, 16)])
def test_sorted_rows_and_their_sum(rows, k, experts):
    x, weight = random(rows, 40), torch.rand(rows, k, device=DEVICE)
    chosen = torch.rand(rows, experts, device=DEVICE).topk(k, dim=-1).indices
    found, places, counts = FUSED.permute(x, chosen, experts)
    expected = PLAIN.permute(x, chosen, experts)
    assert torch.equal(found, expected.rows) and torch.equal(counts, expected.counts_E)
    y = random(rows * k, 1100)
    assert_close(FUSED.unpermute(y, places, weight), PLAIN.unpermute(y, expected.order, weight))


@pytest.mark.parametrize("local", [range(0, 3), range(3, 6), range(4, 5)])
def test_local_experts(local, monkeypatch):
    """Each rank sums its own experts; what no product wrote is not read."""

    def experts(self, x, counts, matrices):
        y = torch.full_like(x, torch.nan)
        ends = counts.cumsum(0).tolist()
        for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            y[start:stop] = x[start:stop] * (index + 1)
        return y

    monkeypatch.setattr(CudaFused, "experts", experts)
    x, weight = random(9, 32), torch.rand(9, 2, device=DEVICE)
    chosen = torch.rand(9, 6, device=DEVICE).topk(2, dim=-1).indices
    found = FUSED.local_experts(x, chosen, weight, 6, local, (x, x))
    factor = torch.where((chosen >= local.start) & (chosen < local.stop), chosen - local.start + 1, 0) * weight
    assert_close(found, (factor.sum(1, keepdim=True) * x.float()).to(x.dtype))


def test_swiglu():
    x = random(3, 2 * 1500)
    assert_close(FUSED.swiglu(x), PLAIN.swiglu(x.float()).to(x.dtype))


def test_gradients_are_those_of_the_table_that_this_one_extends():
    """Outside of inference mode no kernel is called: what a trainer compares is computed alike."""
    with torch.inference_mode(False):
        x = random(4, 32).requires_grad_()
        FUSED.swiglu(x).sum().backward()
        assert x.grad is not None


@pytest.mark.skipif(DEVICE == "cuda", reason="they have been compiled")
def test_kernels_compile_for_a_card(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.npu.compile_triton"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"_attend", "_join", "_route"} <= {*done.stdout.split()}
