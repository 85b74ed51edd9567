from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.model import Head, Mesh, Parallel
from fusion.training.batch import KeptIds
from fusion.training.logprobs import TokenLogprobs, vocab_parallel_logprobs
from fusion.training.segments import owners
from tests.helpers import run_ranks


def logits_and_targets(rows: int = 7, vocabulary: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(rows, vocabulary, generator=random)
    logits[0, 3] = 80.0  # far beyond what exp takes without a shift
    return logits, torch.randint(vocabulary, (rows,), generator=random)


def logprobs_of(logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh | None = None, **options: Any) -> TokenLogprobs:
    """Those of whole logits: hidden states which the identity, as a head, leaves what they are."""
    mesh = mesh or Mesh.single()
    share = logits.shape[1] // mesh.parallel.tp
    own = slice(mesh.tp_rank * share, (mesh.tp_rank + 1) * share)
    head = Head([torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)[own]])
    return vocab_parallel_logprobs(logits, head, targets.to(logits.device), mesh, **options)


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
    logprobs, entropy, *_ = logprobs_of(logits, targets, temperature=temperature)
    objective(logprobs, entropy).backward()
    for got, wanted in zip((logprobs, entropy, logits.grad), reference(temperature), strict=True):
        torch.testing.assert_close(got.detach(), wanted, atol=2e-5, rtol=2e-6)


def test_float32_arithmetic_and_a_gradient_in_the_dtype_of_the_logits():
    logits, targets = logits_and_targets()
    half = logits.bfloat16().requires_grad_()
    logprobs, *_ = logprobs_of(half, targets)
    logprobs.sum().backward()
    exact, *_ = logprobs_of(half.detach().float(), targets)
    assert logprobs.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.detach(), exact)


def split_vocabulary(rank, device, temperature):
    mesh = Mesh.create(Parallel(2, tp=2))
    logits, targets = logits_and_targets()
    logits = logits.to(device.torch_device).requires_grad_()
    logprobs, entropy, *_ = logprobs_of(logits, targets, mesh, temperature=temperature)
    objective(logprobs, entropy).backward()
    nothing, *_ = logprobs_of(logits[:0], targets[:0], mesh)
    assert nothing.shape == (0,)
    return logprobs.detach().cpu(), entropy.detach().cpu(), logits.grad.cpu().chunk(2, dim=1)[rank]


def test_a_vocabulary_split_over_tp_gives_the_same():
    (logprobs, entropy, left), (logprobs_1, entropy_1, right) = run_ranks(split_vocabulary, 2, 0.7)
    assert torch.equal(logprobs, logprobs_1) and torch.equal(entropy, entropy_1)
    for got, wanted in zip((logprobs, entropy, torch.cat([left, right], 1)), reference(0.7), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-6)


def kept_ids() -> KeptIds:
    """Of each row the target and others; of one row all of the vocabulary are sampled from, of one only the target."""
    _, targets = logits_and_targets()
    random = torch.Generator().manual_seed(2)
    sets = [
        [int(t), *[i for i in torch.randperm(12, generator=random)[:size].tolist() if i != t]]
        for t, size in zip(targets, (0, 3, 5, 0, 8, 2, 11), strict=True)
    ]
    sets[3] = []
    return KeptIds(torch.tensor([len(ids) for ids in sets]), torch.tensor([i for ids in sets for i in ids]))


def kept_reference(temperature: float) -> tuple[torch.Tensor, ...]:
    """As `reference`, of the distributions over the kept ids; and their mass."""
    logits, targets = logits_and_targets()
    wide, kept = logits.double().requires_grad_(), kept_ids()
    outside = torch.ones_like(wide, dtype=torch.bool)
    outside[owners(kept.counts), kept.ids] = False
    outside[kept.counts == 0] = False
    x = wide / temperature
    logp = x.masked_fill(outside, -torch.inf).log_softmax(-1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp.masked_fill(outside, 0.0)).sum(-1)
    objective(chosen, entropy).backward()
    mass = x.detach().softmax(-1).masked_fill(outside, 0.0).sum(-1)
    return chosen.detach().float(), entropy.detach().float(), mass.float(), wide.grad.float()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_over_kept_ids_equal_to_a_renormalised_softmax_with_gradient(temperature):
    logits, targets = logits_and_targets()
    logits.requires_grad_()
    logprobs, entropy, mass, _ = logprobs_of(logits, targets, temperature=temperature, kept=kept_ids())
    objective(logprobs, entropy).backward()
    for got, wanted in zip((logprobs, entropy, mass, logits.grad), kept_reference(temperature), strict=True):
        torch.testing.assert_close(got.detach(), wanted, atol=2e-5, rtol=2e-6)
    kept = kept_ids()
    logits.grad[owners(kept.counts), kept.ids] = 0.0
    assert not logits.grad[kept.counts > 0].any(), "only kept ids have a gradient"


def test_rows_without_kept_ids_are_to_the_bit_those_of_the_vocabulary():
    logits, targets = logits_and_targets()
    none = KeptIds(torch.zeros(7, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    plain, whole = (logprobs_of(logits, targets, kept=kept) for kept in (None, none))
    assert torch.equal(plain.logprobs, whole.logprobs) and torch.equal(plain.entropy, whole.entropy)
    assert plain.kept_mass is None and whole.kept_mass.eq(1).all()


def split_kept(rank, device, temperature):
    mesh = Mesh.create(Parallel(2, tp=2))
    logits, targets = logits_and_targets()
    logits = logits.to(device.torch_device).requires_grad_()
    values = logprobs_of(logits, targets, mesh, temperature=temperature, kept=kept_ids())
    objective(values.logprobs, values.entropy).backward()
    return *(value.detach().cpu() for value in values[:3]), logits.grad.cpu().chunk(2, dim=1)[rank]


def test_kept_ids_of_a_vocabulary_split_over_tp_give_the_same():
    (*values, left), (*others, right) = run_ranks(split_kept, 2, 0.7)
    assert all(map(torch.equal, values, others))
    for got, wanted in zip((*values, torch.cat([left, right], 1)), kept_reference(0.7), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-6)
