"""The emulated card as a PyTorch device: the same results as the CPU."""

from __future__ import annotations

import copy
import io
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def _model(device):
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)]
    return nn.Sequential(*layers).to(device)


def _train(device, **options):
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    ids = torch.arange(64, device=device).reshape(8, 8) % 16
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_training_equals_the_cpu(card, options):
    assert _train(card.torch_device, **options) == _train("cpu", **options)


def test_results_views_and_writes_equal_the_cpu(card):
    def compute(device):
        x = torch.arange(24.0, device=device).reshape(2, 3, 4)
        y = x.transpose(1, 2)[..., 1:]
        y += 1
        y[0].mul_(2)
        x.index_add_(0, torch.tensor([1], device=device), torch.ones(1, 3, 4, device=device))
        top = x.flatten().topk(5)
        out = torch.empty(0, device=device)
        torch.cat([x.flatten(), top.values], out=out)
        parts = out.split([9, 10, 10])
        parts[0].zero_()
        x.masked_fill_(x > 30, -1)
        x[torch.tensor([0])] += 5
        return x, y, out, top.indices, x.unbind(1)[2], torch.nonzero(x > 3), x.to(torch.complex64).conj() * 1j

    for got, expected in zip(compute(card.torch_device), compute("cpu"), strict=True):
        assert got.device == card.torch_device
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)


def test_a_view_shares_storage_and_an_in_place_operation_returns_its_tensor(card):
    x = torch.zeros(4, 4, device=card.torch_device)
    view = x[1:3].t()
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and view._base is x
    version = x._version
    assert view.add_(1) is view
    assert x._version == version + 1 and x.sum().item() == 8
    x.set_(torch.ones(3, device=card.torch_device).untyped_storage())
    assert x.sum().item() == 3


def test_devices_are_kept_apart(card):
    here, host = torch.ones(3, device=card.torch_device), torch.ones(3)
    elsewhere = torch.ones(3, device="npu:8")
    for other in (host, elsewhere):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2, 2, 2], "a number on the host"
    assert here.copy_(host * 2).tolist() == [2, 2, 2]
    assert elsewhere.copy_(here).tolist() == [2, 2, 2]
    assert host.copy_(here, non_blocking=True).tolist() == [2, 2, 2]
    assert (here.to("npu:8") + elsewhere).device.index == 8
    assert here.cpu().numpy().sum() == 6
    with pytest.raises(ValueError, match="16 cards"):
        torch.ones(1, device="npu:16")


def test_autocast_casts_nothing_and_warns(card):
    x = torch.randn(4, 4, device=card.torch_device)
    with pytest.warns(UserWarning, match="Disabling autocast"), torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32


def test_activation_checkpointing_repeats_the_random_numbers(card):
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(card.torch_device)
    x = torch.randn(16, 32, device=card.torch_device)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(3)
        run(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for plain, repeated in zip(*gradients, strict=True):
        assert torch.equal(plain, repeated)


def test_random_numbers(card):
    torch.manual_seed(5)
    first, dropped = torch.rand(4, device=card.torch_device), F.dropout(torch.ones(99, device=card.torch_device))
    host_state = torch.get_rng_state()
    state = torch.npu.get_rng_state()
    more = torch.rand(4, device=card.torch_device)
    assert torch.equal(torch.get_rng_state(), host_state), "the card has numbers of its own"
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=card.torch_device), more)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device=card.torch_device), first)
    assert torch.equal(F.dropout(torch.ones(99, device=card.torch_device)), dropped)
    generators = [torch.Generator(card.torch_device).manual_seed(1) for _ in range(2)]
    a, b = (torch.randn(3, device=card.torch_device, generator=generator) for generator in generators)
    assert torch.equal(a, b) and not torch.equal(a, torch.randn(3, device=card.torch_device, generator=generators[0]))
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator"):
        torch.randn(3, device=card.torch_device, generator=torch.Generator())
    assert sorted(torch.randperm(5, device=card.torch_device).tolist()) == [0, 1, 2, 3, 4]


def test_save_and_load(card):
    model = _model(card.torch_device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for location, device in ((None, card.torch_device), ("cpu", torch.device("cpu"))):
        file.seek(0)
        state = torch.load(file, map_location=location)
        assert all(value.device == device for value in state.values())
        assert torch.equal(state["2.weight"].cpu(), model[2].weight.detach().cpu())
    again = copy.deepcopy(model)
    assert again[2].weight.device == card.torch_device and again[2].weight.data_ptr() != model[2].weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul(card, dtype):
    def compute(device):
        torch.manual_seed(0)
        x = torch.randn(12, 16, dtype=dtype).to(device).requires_grad_()
        weight = torch.randn(3, 16, 32, dtype=dtype).to(device).requires_grad_()
        offsets = torch.tensor([4, 4, 12], device=device, dtype=torch.int32)
        y = F.grouped_mm(x, weight, offs=offsets)
        (y * y.detach()).sum().backward()
        return y, x.grad, weight.grad

    for got, expected in zip(compute(card.torch_device), compute("cpu"), strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(card, causal):
    def compute(device):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 16, 32).to(device).requires_grad_() for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y.square().sum().backward()
        return y, q.grad, k.grad, v.grad

    for got, expected in zip(compute(card.torch_device), compute("cpu"), strict=True):
        assert torch.equal(got.cpu(), expected)


def test_streams_and_events(card):
    stream = card.new_stream()
    start, end = card.event(timing=True), card.event(timing=True)
    with card.on_stream(stream):
        assert torch.npu.current_stream() == stream
        start.record()
        torch.ones(100, device=card.torch_device).sum()
        end.record()
    assert torch.npu.current_stream() == torch.npu.default_stream() != stream
    card.current_stream().wait_stream(stream)
    end.wait(card.current_stream())
    end.synchronize()
    card.synchronize()
    assert end.query() and start.elapsed_time(end) > 0
    stream.record_event(end)
    stream.wait_event(end)


def test_accelerator_names_answer(card):
    x = torch.zeros(1000, device=card.torch_device)
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.memory_allocated(9) == torch.npu.memory_allocated(9) == 4096
    assert torch.accelerator.get_memory_info(9) == torch.npu.mem_get_info(9) == ((60 << 20) - 40960, 60 << 20)
    assert torch.npu.memory_stats(9)["requested_bytes.all.current"] == 4000
    torch.accelerator.empty_cache()
    torch.accelerator.synchronize()
    assert torch.npu.mem_get_info(9)[1] == 60 << 20
    assert x.type() == "torch.npu.FloatTensor" and x.is_npu and x.cpu().npu().is_npu


def _in_child(pipe):
    try:
        torch.ones(1, device="npu")
        pipe.send("no error")
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_frees_nothing_of_its_parent(card):
    held = torch.ones(1000, device=card.torch_device)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(there,))
    child.start()
    assert "start workers with 'spawn'" in here.recv()
    child.join()
    assert card.memory().requested == 4000
    del held
