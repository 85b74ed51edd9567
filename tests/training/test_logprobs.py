from __future__ import annotations

import pytest
import torch

from fusion.model import Mesh, Parallel
from fusion.training.logprobs import vocab_parallel_logprobs
from tests.helpers import run_ranks


def logits_and_targets(rows: int = 7, vocabulary: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(rows, vocabulary, generator=random)
    logits[0, 3] = 80.0  # far beyond what exp takes without a shift
    return logits, torch.randint(vocabulary, (rows,), generator=random)


def reference(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of their weighted sum, by torch's log_softmax in float64."""
    logits, targets = logits_and_targets()
    wide = logits.double().requires_grad_()
    logp = (wide / temperature).log_softmax(-1)
    chosen, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    objective(chosen, entropy).backward()
    return chosen.detach().float(), entropy.detach().float(), wide.grad.float()


def objective(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(logprobs) + 1, dtype=logprobs.dtype, device=logprobs.device)
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_log_softmax_with_gradient(temperature):
    logits, targets = logits_and_targets()
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, Mesh.single(), temperature)
    objective(logprobs, entropy).backward()
    for got, wanted in zip((logprobs, entropy, logits.grad), reference(temperature), strict=True):
        torch.testing.assert_close(got.detach(), wanted, atol=2e-5, rtol=2e-6)


def test_float32_arithmetic_and_a_gradient_in_the_dtype_of_the_logits():
    logits, targets = logits_and_targets()
    half = logits.bfloat16().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(half, targets, Mesh.single())
    logprobs.sum().backward()
    exact, _ = vocab_parallel_logprobs(half.detach().float(), targets, Mesh.single())
    assert logprobs.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.detach(), exact)


def split_vocabulary(rank, device, temperature):
    mesh = Mesh.create(Parallel(2, tp=2))
    logits, targets = logits_and_targets()
    mine = logits.chunk(2, dim=1)[rank].contiguous().to(device.torch_device).requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(mine, targets.to(mine.device), mesh, temperature)
    objective(logprobs, entropy).backward()
    nothing, _ = vocab_parallel_logprobs(mine[:0], targets[:0].to(mine.device), mesh)
    assert nothing.shape == (0,)
    return logprobs.detach().cpu(), entropy.detach().cpu(), mine.grad.cpu()


def test_a_vocabulary_split_over_tp_gives_the_same():
    (logprobs, entropy, left), (logprobs_1, entropy_1, right) = run_ranks(split_vocabulary, 2, 0.7)
    assert torch.equal(logprobs, logprobs_1) and torch.equal(entropy, entropy_1)
    for got, wanted in zip((logprobs, entropy, torch.cat([left, right], 1)), reference(0.7), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-6)
