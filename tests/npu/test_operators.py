"""Operators of the emulated card that a device must provide itself, and those that it refuses."""

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize(
    ("function", "dtype"),
    [("sgn", torch.float32), ("sgn", torch.complex64), ("sign", torch.float32), ("round", torch.float32)],
)
def test_gradients_that_are_zero_everywhere(card, function, dtype):
    def compute(device):
        x = torch.arange(-3.0, 3.0).to(dtype).to(device).requires_grad_()
        (getattr(torch, function)(x) * 2).sum().abs().backward()
        return x.grad.clone(), x.grad + 1, x.grad * x.detach(), x.grad.view(2, 3).sum(0)

    for got, expected in zip(compute(card.torch_device), compute("cpu"), strict=True):
        assert got.device == card.torch_device and torch.equal(got.cpu(), expected)


CONVOLUTIONS = [
    (F.conv1d, (2, 4, 9), (6, 4, 3), dict(stride=2, padding=1)),
    (F.conv1d, (2, 4, 9), (4, 1, 3), dict(padding=2, dilation=2, groups=4)),
    (F.conv2d, (2, 4, 8, 8), (6, 4, 3, 3), dict(padding="same")),
    (F.conv3d, (1, 2, 5, 5, 5), (3, 2, 2, 2, 2), {}),
    (F.conv_transpose1d, (2, 4, 9), (4, 3, 3), dict(stride=2, output_padding=1)),
    (F.conv_transpose2d, (2, 4, 5, 5), (4, 2, 3, 3), dict(stride=2, groups=2)),
]


@pytest.mark.parametrize(("function", "shape", "kernel", "options"), CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions(card, function, shape, kernel, options, biased):
    def compute(device):
        torch.manual_seed(0)
        x, weight = (torch.randn(size).to(device).requires_grad_() for size in (shape, kernel))
        transposed = "transpose" in function.__name__
        channels = kernel[1] * options.get("groups", 1) if transposed else kernel[0]
        bias = torch.randn(channels).to(device).requires_grad_() if biased else None
        y = function(x, weight, bias, **options)
        (y * y.detach()).sum().backward()
        return [y, x.grad, weight.grad, *([bias.grad] if biased else [])]

    before = card.memory().allocated
    for got, expected in zip(compute(card.torch_device), compute("cpu"), strict=True):
        assert got.device == card.torch_device and torch.equal(got.cpu(), expected)
    del got
    assert card.memory().allocated == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_emulated_are_refused_by_name(card):
    x = torch.eye(4, device=card.torch_device)
    table = torch.ones(8, 4, device=card.torch_device, requires_grad=True)
    ids = torch.tensor([1, 2], device=card.torch_device)
    refused = [
        x.to_sparse,
        x.to_sparse_csr,
        x.to_sparse_csc,
        lambda: x.to_sparse_bsr((2, 2)),
        lambda: x.to_mkldnn(),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda: F.embedding(ids, table, sparse=True).sum().backward(),
        lambda: torch.eye(4).to_sparse().to(card.torch_device),
        lambda: torch.sparse_coo_tensor(ids[None], x[:2, 0], (4,)),
    ]
    for call in refused:
        with pytest.raises(NotImplementedError, match="supports only strided tensors"):
            call()
