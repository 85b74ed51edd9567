from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.offload import Offloader
from fusion.training import AlgorithmConfig, Sequences, load_checkpoint, save_checkpoint
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.config import ALGORITHMS
from fusion.training.interface import SKIPPED_IN_A_ROW
from fusion.training.objective import SHARED
from tests.helpers import run_ranks, tiny_checkpoint, tiny_hf
from tests.training.ranks import LONGEST, Case, make_engine, sample_batch, with_policy
from tests.training.sequences import sequences_of

GRPO = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST).loss
SFT = cross_entropy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), router_aux_loss_coef=0.05)


def engine_of(checkpoint: str, device: Any, dtype: str = "float32", **training: Any):
    return make_engine(Case(checkpoint, training=training, dtype=dtype), device)


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {name: view.cpu().clone() for name, view in engine.optimizer.gradients.views.items()}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    scale = max(float(tensor.abs().max()) for tensor in right.values())
    for name, wanted in right.items():
        torch.testing.assert_close(left[name], wanted, atol=tolerance * scale, rtol=tolerance, msg=name)


def hf_logprobs(model: torch.nn.Module, batch: Sequences, temperature: float = 1.0) -> torch.Tensor:
    """[N] by transformers, one sequence at a time; 0 where the loss mask is off."""
    pieces = []
    for tokens, mask in zip(batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True):
        logp = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        chosen = logp[:-1].gather(1, tokens[1:, None])[:, 0]
        pieces.append(torch.cat([torch.zeros(1), chosen]) * mask)
    return torch.cat(pieces)


def test_loss_and_gradient_equal_transformers(checkpoint, device):
    batch, model = sample_batch(12, seed=3), tiny_hf(router_aux_loss_coef=0.05)
    loss = -hf_logprobs(model, batch).sum() / batch.loss_mask.sum()
    loss.backward()
    loss = loss.detach()
    engine = engine_of(checkpoint, device, load_balancing_coef=0.0)
    metrics = engine.forward_backward(batch, SFT)
    assert metrics["actor/loss"] == pytest.approx(float(loss), rel=1e-5)
    ours, theirs = gradients(engine), dict(model.named_parameters())
    for local, hf in (
        ("embed", "model.embed_tokens.weight"),
        ("layers.0.moe.router", "model.layers.0.mlp.gate.weight"),
        ("layers.1.attention.out", "model.layers.1.self_attn.o_proj.weight"),
        ("layers.0.attention.q_norm", "model.layers.0.self_attn.q_norm.weight"),
    ):
        torch.testing.assert_close(ours[local], theirs[hf].grad, atol=1e-5, rtol=1e-4, msg=local)
    stacked = theirs["model.layers.1.mlp.experts.gate_up_proj"].grad
    for expert, wanted in enumerate(stacked):
        name = f"layers.1.moe.experts.{expert}.gate_up"
        torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-4, msg=name)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert engine.optimizer_step()["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_load_balancing_loss_equals_transformers(checkpoint, device):
    """Over one batch of equal lengths, as transformers counts padding rows too."""
    batch = sample_batch(40, seed=5)
    length = max(set(batch.lengths), key=batch.lengths.count)
    batch = batch.select([i for i, size in enumerate(batch.lengths) if size == length])
    model = tiny_hf(router_aux_loss_coef=0.05)
    out = model(batch.tokens.view(-1, length), output_router_logits=True)
    engine = engine_of(checkpoint, device, token_budget=2 * length)
    metrics = engine.forward_backward(batch, SFT)
    assert len(batch.lengths) > 4
    assert metrics["actor/load_balancing_loss"] == pytest.approx(float(out.aux_loss.detach()), rel=1e-5)
    wanted = metrics["actor/sft_loss"] + 0.05 * metrics["actor/load_balancing_loss"]
    assert metrics["actor/loss"] == pytest.approx(wanted)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_move_no_weight(checkpoint, device, name):
    """By default, without weight decay: nor does the balance of experts that config.json states."""
    engine = engine_of(checkpoint, device, weight_decay=0.0, load_balancing_coef=None)
    before = {name: view.clone() for name, view in engine.model.weights.views.items()}
    batch = with_policy(sample_batch(12, seed=3), engine)
    algorithm = make_algorithm(AlgorithmConfig(name=name, overlong_buffer=0), LONGEST)
    groups = [str(index // 4) for index in range(12)]
    advantages, trained = algorithm.advantages([0.3] * 12, groups, [1] * 12)
    assert trained.all()
    batch = replace(batch, advantages=advantages.repeat_interleave(torch.tensor(batch.lengths)))
    engine.forward_backward(algorithm.weigh(batch), algorithm.loss)
    assert engine.optimizer_step()["actor/grad_norm"] == 0
    assert [name for name, view in engine.model.weights.views.items() if not torch.equal(view, before[name])] == []


def test_logprobs_and_entropy_equal_transformers_in_the_order_given(checkpoint, device):
    batch = sample_batch(12, seed=4)
    engine = engine_of(checkpoint, device, token_budget=30)
    engine.temperature = 0.7
    logprobs, entropy = engine.logprobs(batch)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, hf_logprobs(tiny_hf(), batch, 0.7), atol=1e-5, rtol=1e-5)
    assert (entropy[batch.loss_mask] > 0).all() and not entropy[~batch.loss_mask].any()


def test_gradient_and_metrics_do_not_depend_on_micro_batches_or_packing(checkpoint, device):
    results = []
    for budget, order in ((1000, range(12)), (30, range(12)), (1, range(11, -1, -1))):
        engine = engine_of(checkpoint, device, token_budget=budget)
        batch = with_policy(sample_batch(12, seed=3), engine).select(list(order))
        results.append((engine.forward_backward(batch, GRPO), gradients(engine)))
    (metrics, wanted), *others = results
    for other_metrics, got in others:
        assert other_metrics == pytest.approx(metrics, rel=1e-5)
        close(got, wanted)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_same_gradient_in_any_micro_batches(checkpoint, device, name):
    algorithm = make_algorithm(AlgorithmConfig(name=name, correction="tis_sequence", kl_coef=0.1), LONGEST)
    engine = engine_of(checkpoint, device)
    whole, results = algorithm.weigh(with_policy(sample_batch(12, seed=3), engine)), []
    for budget, order in ((1000, range(12)), (30, range(11, -1, -1))):
        engine.config.token_budget = budget
        engine.optimizer.zero_gradients()
        results.append((engine.forward_backward(whole.select(list(order)), algorithm.loss), gradients(engine)))
    (metrics, wanted), (others, found) = results
    assert others == pytest.approx(metrics, rel=1e-5)
    close(found, wanted)


def test_weights_of_tokens_give_the_mean_of_sequence_means(checkpoint, device):
    batch = sample_batch(6, seed=8)
    share = torch.cat([mask / mask.sum().clamp(min=1) for mask in batch.loss_mask.float().split(batch.lengths)])
    engine = engine_of(checkpoint, device, token_budget=20, load_balancing_coef=0.0)
    metrics = engine.forward_backward(replace(batch, token_weight=share), SFT)
    logprobs, _ = engine.logprobs(batch)
    trained = [i for i, mask in enumerate(batch.loss_mask.split(batch.lengths)) if mask.any()]
    means = [logprobs.split(batch.lengths)[i][batch.loss_mask.split(batch.lengths)[i]].mean() for i in trained]
    assert metrics["actor/loss"] == pytest.approx(-float(sum(means)) / len(trained), rel=1e-5)


def test_gradients_of_several_calls_add_up(checkpoint, device):
    engine, batch = engine_of(checkpoint, device, token_budget=40), sample_batch(8, seed=2)
    engine.forward_backward(batch, SFT)
    once = gradients(engine)
    engine.forward_backward(batch, SFT)
    close(gradients(engine), {name: 2 * tensor for name, tensor in once.items()})


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_a_batch_in_parts_has_the_gradient_of_the_whole_batch_and_steps_alike(checkpoint, device, name):
    algorithm = make_algorithm(AlgorithmConfig(name=name, kl_coef=0.1), LONGEST)
    whole, parted = (engine_of(checkpoint, device, load_balancing_coef=0.0) for _ in range(2))
    batch = algorithm.weigh(with_policy(sample_batch(12, seed=3), whole))
    expected = whole.forward_backward(batch, algorithm.loss)
    for number, part in enumerate([range(2), range(2, 9), [], range(9, 12)]):
        metrics = parted.forward_backward(batch.select(list(part)), algorithm.loss, continued=number > 0)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6), "they are means over the tokens of the whole batch"
    close(gradients(parted), gradients(whole))
    assert parted.optimizer_step() == pytest.approx(whole.optimizer_step(), rel=1e-5)
    parted.forward_backward(batch, algorithm.loss)
    whole.forward_backward(batch, algorithm.loss)
    close(gradients(parted), gradients(whole), 1e-3)


def test_a_batch_that_nothing_came_before_is_not_continued(checkpoint, device):
    engine = engine_of(checkpoint, device)
    with pytest.raises(AssertionError, match="no batch to continue"):
        engine.forward_backward(sample_batch(3, seed=1), SFT, continued=True)


def test_recompute_gives_the_same_gradients(checkpoint, device):
    plain, again = engine_of(checkpoint, device), engine_of(checkpoint, device, recompute=True)
    batch = with_policy(sample_batch(12, seed=3), plain)
    assert plain.forward_backward(batch, GRPO) == again.forward_backward(batch, GRPO)
    left, right = gradients(plain), gradients(again)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_bf16_trains_with_fp32_gradients_near_those_of_fp32(checkpoint, device):
    exact, engine = engine_of(checkpoint, device), engine_of(checkpoint, device, dtype="bfloat16")
    batch = sample_batch(12, seed=3)
    exact.forward_backward(batch, SFT)
    metrics = engine.forward_backward(batch, SFT)
    assert all(flat.dtype == torch.float32 for flat in engine.optimizer.gradients.flats)
    left, right = (torch.cat([flat.cpu() for flat in e.optimizer.gradients.flats]) for e in (engine, exact))
    assert torch.nn.functional.cosine_similarity(left, right, dim=0) > 0.99
    engine.optimizer_step()
    assert engine.forward_backward(batch, SFT)["actor/loss"] < metrics["actor/loss"]


def test_a_batch_without_trained_tokens_has_no_gradient(checkpoint, device):
    engine = engine_of(checkpoint, device, load_balancing_coef=0.0)
    batch = sample_batch(3, seed=1)
    metrics = engine.forward_backward(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), GRPO)
    assert metrics == {SHARED: 0.0}
    assert not any(tensor.any() for tensor in gradients(engine).values())


def test_a_batch_without_sequences_makes_no_step(checkpoint, device):
    """Momentum and weight decay would move the weights without any gradient."""
    engine, batch = engine_of(checkpoint, device, weight_decay=0.1), sample_batch(3, seed=1)
    engine.forward_backward(batch, SFT)
    engine.optimizer_step()
    before, loaded = {name: view.clone() for name, view in engine.model.weights.views.items()}, []
    for continued in (False, True):
        engine.forward_backward(batch.select([]), SFT, continued=continued)
    figures = engine.optimizer_step(lambda: loaded.append(True))
    assert figures["actor/grad_norm"] == figures[SKIPPED_IN_A_ROW] == 0 and loaded and not engine.accumulating
    assert all(torch.equal(view, before[name]) for name, view in engine.model.weights.views.items())
    assert engine.optimizer.steps == 1
    engine.forward_backward(batch, SFT)
    engine.forward_backward(batch.select([]), SFT, continued=True)
    engine.optimizer_step()
    assert engine.optimizer.steps == 2 and not torch.equal(engine.model.weights.views["norm"], before["norm"])


def test_gradients_can_be_released_only_when_used_up(checkpoint, device, tmp_path):
    engine = engine_of(checkpoint, device)
    engine.forward_backward(sample_batch(3, seed=1), SFT)
    assert engine.accumulating
    for change in (engine.release_gradients, engine.allocate_gradients):
        with pytest.raises(AssertionError, match="no optimizer step"):
            change()
    engine.optimizer_step()
    assert not engine.accumulating
    before = device.memory_by_owner()["gradients"]
    engine.release_gradients()
    assert before - device.memory_by_owner()["gradients"] >= engine.optimizer.gradients.nbytes
    engine.allocate_gradients()
    engine.forward_backward(sample_batch(3, seed=1), SFT)
    fresh = engine_of(checkpoint, device)
    save_checkpoint(engine, tmp_path / "trainer")
    load_checkpoint(fresh, tmp_path / "trainer")
    fresh.forward_backward(sample_batch(3, seed=1), SFT)
    close(gradients(engine), gradients(fresh), 0.0)


def test_a_partial_accumulation_goes_to_the_host_and_back_bitwise(checkpoint, device):
    stays, travels = engine_of(checkpoint, device), engine_of(checkpoint, device)
    offloader, (first, second) = Offloader(device), (sample_batch(8, seed=seed) for seed in (1, 2))
    for engine in (stays, travels):
        engine.forward_backward(first, SFT)
    offloader.out(travels.gradients())
    offloader.wait()
    assert travels.accumulating and not travels.optimizer.gradients.resident
    offloader.back()
    offloader.wait()
    for engine in (stays, travels):
        engine.forward_backward(second, SFT)
    close(gradients(travels), gradients(stays), 0.0)
    assert travels.optimizer_step() == stays.optimizer_step()


def test_cosine_needs_the_length_of_the_run(checkpoint, device):
    with pytest.raises(ValueError, match="cosine"):
        engine_of(checkpoint, device, schedule="cosine")


def one_rank_has_all(rank, device, case):
    """The first data-parallel rank gets every sample."""
    engine = make_engine(case, device)
    batch = sample_batch(5, seed=6)
    empty = engine.mesh.dp_rank > 0
    mine = batch.select([] if empty else range(5))
    logprobs, _ = engine.logprobs(mine)
    metrics = engine.forward_backward(mine, SFT) | engine.optimizer_step()
    return metrics, logprobs


@pytest.mark.parametrize(
    "layout", [Parallel(2, 1, 2), Parallel(4, 2, 2), Parallel(4, 2, 4), Parallel(4, 1, 2, pp=2)], ids=str
)
def test_a_rank_without_samples_takes_part(checkpoint, layout):
    training = {"token_budget": 20, "recompute": True}
    (wanted, logprobs), *_ = run_ranks(one_rank_has_all, 1, Case(checkpoint, training=training))
    results = run_ranks(one_rank_has_all, layout.world, Case(checkpoint, layout, training))
    for rank, (metrics, got) in enumerate(results):
        assert metrics == pytest.approx(wanted, rel=1e-5)
        if layout.coordinate("dp", rank) == 0:
            torch.testing.assert_close(got, logprobs, atol=1e-5, rtol=1e-5)
        else:
            assert got.shape == (0,)


def fewer_rows_than_tp_ranks(rank, device, checkpoint, layout):
    engine = make_engine(Case(checkpoint, layout), device)
    return engine.forward_backward(sequences_of([[3]], [[]]), SFT)


@pytest.mark.parametrize("layout", [Parallel(2, 2, 2), Parallel(4, 2, 2, pp=2)], ids=str)
def test_a_single_row_may_be_split_over_tp(checkpoint, layout):
    metrics = run_ranks(fewer_rows_than_tp_ranks, layout.world, checkpoint, layout)[0]
    assert metrics.keys() == {"actor/load_balancing_loss", "actor/loss", SHARED}
