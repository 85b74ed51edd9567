"""Captured operators run again on what their inputs hold then; what a card could not capture raises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.npu import open_device
from fusion.npu.operators import operators_of


@pytest.fixture(scope="module")
def device():
    opened = open_device("emulated", capacity_bytes=2 << 30)
    if opened.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    operators_of("emulated", "ascend")  # defines the operators of torch.ops.npu
    return opened


STEPS = {
    "in place": lambda x, y, at: (x.add_(y.sum()).clamp_(-9, 9), y),
    "view": lambda x, y, at: (x.t().contiguous().t(), y.reshape(-1)),
    "new": lambda x, y, at: (x * 2 - 1, torch.cat([y.flatten(), x.flatten()])[: y.numel()].view(y.shape)),
    "out": lambda x, y, at: (torch.mul(x, 3, out=torch.empty_like(x)), y),
    "written": lambda x, y, at: (x.index_copy_(0, at, x.index_select(0, at) + 1), y),
    "made": lambda x, y, at: (x + torch.arange(x.shape[1], device=x.device), torch.zeros_like(y) + y.sum()),
    "two": lambda x, y, at: (x.sort(dim=-1)[0], y.topk(1, dim=-1)[0]),
    "custom": lambda x, y, at: (torch.ops.npu.npu_rms_norm(x, torch.ones_like(x[0]), 1e-6)[0], y),
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8), st.integers(0, 99))
def test_a_replay_computes_what_the_operators_do(device, names, seed):
    draw = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(4, 6, generator=draw) for _ in range(2))
    at = torch.tensor([2, 0])

    def compute(x, at):
        x, y = x + 0, x * 1
        for name in names:
            x, y = STEPS[name](x, y, at)
        return x, y

    with torch.inference_mode():
        x, rows = first.to("npu"), at.to("npu")
        graph, found = device.capture(lambda: compute(x, rows))
        for values, places in ((second, at), (first, at.flip(0))):
            x.copy_(values)
            rows.copy_(places)
            graph.replay()
            for one, wanted in zip(found, compute(values.to("npu"), places.to("npu")), strict=True):
                assert torch.equal(one.cpu(), wanted.cpu())


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(4, 6)),
        lambda x: x + torch.ones(4, 6).to("npu"),
        lambda x: x.index_select(0, torch.tensor([1], device="npu")),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
    ],
    ids=["item", "tolist", "cpu", "copied", "sent", "made", "masked", "asked"],
)
def test_what_waits_for_the_host_cannot_be_captured(device, wait):
    x = torch.ones(4, 6, device="npu")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        device.capture(lambda: wait(x))


def test_a_number_of_the_host_is_the_one_of_the_capture(device):
    x, factor = torch.ones(3, device="npu"), [2.0]
    with torch.inference_mode():
        graph, y = device.capture(lambda: x * factor[0] + len(torch.ones(5)))
        factor[0] = 7.0
        graph.replay()
    assert y.tolist() == [7.0] * 3


def test_memory_that_moved_is_noticed(device):
    x = torch.ones(1 << 18, device="npu")
    with torch.inference_mode():
        graph, _ = device.capture(lambda: x + 1)
        x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="memory that the graph reads has moved"):
            graph.replay()
        graph.reset()
        graph.replay()


def test_lengths_are_updated_for_one_operator_or_all(device):
    query, lengths = torch.randn(2, 2, 1, 8, device="npu"), [3, 5]
    keys, values = torch.randn(4, 2, 4, 8, device="npu"), torch.randn(4, 2, 4, 8, device="npu")
    options = dict(num_heads=2, num_key_value_heads=2, scale=1.0, input_layout="BNSD", block_size=4)
    options["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).to("npu")

    def attend(lengths):
        return torch.ops.npu.npu_fused_infer_attention_score(
            query, keys, values, actual_seq_lengths_kv=lengths, **options
        )[0]

    with torch.inference_mode():
        graph, (one, other) = device.capture(lambda: (attend([8, 8]), attend([8, 8])))
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths, "other": 1}])
        graph.replay()
        assert torch.equal(one.cpu(), attend(lengths).cpu()) and torch.equal(one.cpu(), other.cpu())
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 2]}, {}])
        graph.replay()
        assert torch.equal(one.cpu(), attend([1, 2]).cpu()) and torch.equal(other.cpu(), attend(lengths).cpu())
        with pytest.raises(RuntimeError, match="2 operators are updated, and 3"):
            graph.update(cpu_update_input=[{}, {}, {}])
