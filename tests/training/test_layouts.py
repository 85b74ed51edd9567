"""One checkpoint and one batch: every layout computes the same loss, the same gradient norm and the same policy."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fusion.model import Parallel, moe
from fusion.model.exchange import RowExchange, plan_exchange
from fusion.npu.operators import Plain
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.batch import UNREAD
from fusion.training.interface import SKIPPED_IN_A_ROW
from tests.helpers import run_ranks, tiny_checkpoint
from tests.pairwise import axes, thinned
from tests.stacked import Stacked
from tests.training.ranks import LONGEST, Case, make_engine, my_share, sample_batch, train

BAR = {
    "TP2EP2": Parallel(4, tp=2, ep=2),
    "TP2PP2EP2": Parallel(4, tp=2, ep=2, pp=2),
    "EP4": Parallel(4, ep=4),
    "PP4": Parallel(4, pp=4),
    "TP2ETP2EP2": Parallel(4, tp=2, ep=2, etp=2),
    "DP4": Parallel(4),
}
MORE = {
    "TP2": Parallel(2, tp=2),
    "PP2DP2": Parallel(4, pp=2),
    "PP2EP2": Parallel(4, ep=2, pp=2),
    "PP2ETP2": Parallel(4, pp=2, etp=2),
    "PP3": Parallel(3, pp=3),
}
MICRO_BATCHES = {"token_budget": 25, "recompute": True}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Parallel]]] = {
    # of the checkpoint, of the run, layouts
    "tied": (
        {"num_hidden_layers": 4},
        {"training": {"load_balancing_coef": 0.05, "clip_grad": 1.0} | MICRO_BATCHES, "accumulate": 2},
        BAR,
    ),
    "untied-uneven-stages-small-buckets": (
        {"num_hidden_layers": 3, "tie_word_embeddings": False},
        {"training": {"load_balancing_coef": 0.05, "token_budget": 60}, "bucket_bytes": 3000},
        MORE | {"TP2EP2": BAR["TP2EP2"], "TP2PP2EP2": BAR["TP2PP2EP2"]},
    ),
    "tied-uneven-stages-one-micro-batch": (
        {"num_hidden_layers": 3},
        {"training": {"load_balancing_coef": 0.0}, "bucket_bytes": 12000},
        {"PP2DP2": MORE["PP2DP2"], "TP2PP2": Parallel(4, tp=2, pp=2), "EP2": Parallel(2, ep=2)},
    ),
    "dr-grpo": (
        {"num_hidden_layers": 2},
        {"training": MICRO_BATCHES, "algorithm": {"name": "dr_grpo", "correction": "tis_sequence"}},
        {"DP4": BAR["DP4"], "TP2PP2": Parallel(4, tp=2, pp=2)},
    ),
    "gspo": (
        {"num_hidden_layers": 2},
        {"training": MICRO_BATCHES, "algorithm": {"name": "gspo", "correction": "mask_sequence"}},
        {"DP4": BAR["DP4"], "PP2DP2": Parallel(4, pp=2)},
    ),
    "dense": (
        {"experts": False},
        {"training": {"token_budget": 30}, "bucket_bytes": 20000, "streamed": True},
        {"TP2": MORE["TP2"], "TP2DP2": Parallel(4, tp=2), "PP2DP2": MORE["PP2DP2"], "TP4": Parallel(4, tp=4)},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny_checkpoint(folder / name, **changes) for name, (changes, _, _) in SETTINGS.items()}


def run(checkpoint: str, setting: str, layout: Parallel) -> list[dict[str, Any]]:
    return run_ranks(train, layout.world, Case(checkpoint, layout, steps=2, **SETTINGS[setting][1]))


_single = lru_cache(maxsize=None)(lambda checkpoint, setting: run(checkpoint, setting, Parallel())[0])


CASES = [(name, layout) for name, (_, _, layouts) in SETTINGS.items() for layout in layouts]
DEFAULT = {
    "tied": ("TP2PP2EP2", "EP4"),
    "untied-uneven-stages-small-buckets": ("PP2ETP2",),
    "tied-uneven-stages-one-micro-batch": ("EP2",),
    "dr-grpo": ("DP4",),
    "gspo": ("DP4",),
    "dense": ("TP4",),
}


@pytest.mark.parametrize(
    ("setting", "layout"),
    [
        pytest.param(*case.values, marks=case.marks or pytest.mark.extended)
        if case.values[1] not in DEFAULT[case.values[0]]
        else pytest.param(*case.values)
        for case in thinned(CASES, lambda case: (case[0], *axes(SETTINGS[case[0]][2][case[1]])))
    ],
)
def test_a_layout_trains_as_one_rank_does(checkpoints, setting, layout):
    wanted = _single(checkpoints[setting], setting)
    results = run(checkpoints[setting], setting, SETTINGS[setting][2][layout])
    for step, metrics in enumerate(results[0]["steps"]):
        assert metrics == pytest.approx(wanted["steps"][step], rel=1e-5, abs=1e-7)
    assert all(result["steps"] == results[0]["steps"] for result in results)
    before, weights = load_file(f"{checkpoints[setting]}/model.safetensors"), results[0]["weights"]
    assert weights.keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        # Adam moves an element by the learning rate whatever its gradient is, so where that is all rounding it moves at
        # random, and differently on other processors: a few elements may differ by much of a step, the rest of a tensor
        # not by a two-thousandth of its way.
        torch.testing.assert_close(weights[name], tensor, atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        few = max(1, tensor.numel() // 200)
        difference = (weights[name] - tensor).abs().flatten().sort().values[:-few]
        assert difference.norm() <= 5e-4 * (tensor - before[name]).norm(), name


def train_on_card(rank, device, operators, case):
    before, device.operators = device.operators, operators
    try:
        return train(rank, device, case)
    finally:
        device.operators = before


@pytest.mark.parametrize(
    "layout", [Parallel(2, ep=2), pytest.param(Parallel(4, tp=2, ep=2, pp=2), marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("bucket_bytes", [70_000, 1 << 20])
def test_stacks_of_experts_train_to_the_bit_as_single_ones_do(checkpoints, layout, bucket_bytes):
    """Also where a stack's gradients lie in several buckets."""
    setting = {"training": {"clip_grad": 0.1, "token_budget": 60}, "steps": 2}
    case = Case(checkpoints["untied-uneven-stages-small-buckets"], layout, bucket_bytes=bucket_bytes, **setting)
    single, stacked = (run_ranks(train_on_card, layout.world, table, case)[0] for table in (Plain(), Stacked()))
    assert single["steps"] == stacked["steps"]
    assert all(torch.equal(tensor, stacked["weights"][name]) for name, tensor in single["weights"].items())


def poisoned(rank, device, case):
    """What each rank reports of an update with a sample whose loss is beyond float32, and whether anything changed."""
    engine = make_engine(case, device)
    batch = sample_batch(case.samples, case.seed)
    assert batch.advantages is not None
    batch.advantages[batch.loss_mask.nonzero()[0]] = 3e38
    engine.forward_backward(my_share(batch, engine), make_algorithm(AlgorithmConfig(), LONGEST).loss)
    state = [*engine.model.weights.flats, *engine.optimizer.tensors().values()]
    before = [tensor.clone() for tensor in state]
    metrics = engine.optimizer_step()
    return metrics, all(torch.equal(left, right) for left, right in zip(before, state, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        Parallel(4, tp=2, pp=2),
        Parallel(2, ep=2),
        pytest.param(Parallel(8, tp=2, ep=2, pp=2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_all_ranks_skip_an_update_with_a_gradient_that_is_not_finite_on_one(checkpoints, layout):
    case = Case(checkpoints["tied"], layout)
    for metrics, unchanged in run_ranks(poisoned, layout.world, case):
        assert unchanged and metrics[SKIPPED_IN_A_ROW] == 1 and not math.isfinite(metrics["actor/grad_norm"])


def continued_by_nothing(rank, device, case):
    """Metrics of a batch, and of it continued by no sequence, and whether that left the gradients alone."""
    engine = make_engine(case, device)
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST)
    batch = algorithm.weigh(my_share(sample_batch(case.samples, case.seed), engine))
    nothing = engine.with_own_routing(batch.select([]))
    nothing = replace(nothing, proximal_logprobs=engine.logprobs(nothing)[0])
    before = engine.forward_backward(engine.with_own_routing(batch), algorithm.loss)
    gradients = [tensor.clone() for tensor in engine.gradients().values()]
    after = engine.forward_backward(algorithm.weigh(nothing), algorithm.loss, continued=True)
    equal = all(map(torch.equal, gradients, engine.gradients().values()))
    return before, after, equal, engine.optimizer_step()


@pytest.mark.parametrize("layout", [Parallel(), Parallel(4, tp=2, ep=2, pp=2), Parallel(4, ep=4)], ids=str)
def test_a_minibatch_that_was_accumulated_whole_is_continued_by_nothing(checkpoints, layout):
    """As the first one of a step may be in the tail of generation, with what `Worker.train` computes before it."""
    case = Case(checkpoints["tied"], layout, training={"load_balancing_coef": 0.05, "token_budget": 25})
    for before, after, equal, step in run_ranks(continued_by_nothing, layout.world, case):
        assert equal and after == pytest.approx(before, rel=1e-12) and step["actor/grad_norm"] > 0


def copies_of_the_embedding(rank, device, case):
    """The embedding and its optimizer states on the first and the last stage."""
    engine = make_engine(case, device)
    for seed in range(2):
        engine.forward_backward(my_share(sample_batch(case.samples, seed), engine), cross_entropy)
        engine.optimizer_step()
    optimizer = engine.optimizer
    found = [view.cpu() for name, view in engine.model.weights.views.items() if name.split(".")[0] == "embed"]
    for index, shard in enumerate(optimizer.shards):
        if shard.tied:
            found += [tensor.cpu() for name, tensor in optimizer.tensors().items() if name.endswith(f".{index}")]
    return found


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [pytest.param(Parallel(4, pp=2), "bfloat16", marks=pytest.mark.extended), (Parallel(4, tp=2, pp=2), "float32")],
    ids=str,
)
def test_both_copies_of_a_tied_embedding_stay_bitwise_equal(checkpoints, layout, dtype):
    case = Case(checkpoints["tied"], layout, dtype=dtype, bucket_bytes=3000, samples=6)
    ranks = run_ranks(copies_of_the_embedding, layout.world, case)
    before = load_file(f"{checkpoints['tied']}/model.safetensors")["model.embed_tokens.weight"]
    for first, last in layout.ends():
        assert len(ranks[first]) > 4
        for left, right in zip(ranks[first], ranks[last], strict=True):
            assert torch.equal(left, right) and left.any()
        assert not torch.equal(ranks[first][0].float(), before[: len(ranks[first][0])])


def with_and_without(rank, device, case):
    """Gradients, metrics and log-probabilities from whole sequences, and from what this stage looks at of them."""
    loss, found = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST).loss, []
    for view in (lambda batch, mesh: batch, looked_at):
        engine = make_engine(case, device)
        batch = view(my_share(sample_batch(case.samples, 3), engine), engine.mesh)
        logprobs, metrics = engine.logprobs(batch)[0], engine.forward_backward(batch, loss)
        found.append((logprobs, metrics, [flat.cpu() for flat in engine.gradients().values()]))
    return found


def looked_at(batch, mesh):
    """The batch as it comes to this stage."""
    if not mesh.first_stage:
        labels = batch.tokens.where(batch.loss_mask, UNREAD)
        batch = replace(batch, held_tokens=labels if mesh.last_stage else None)
    if not mesh.last_stage:
        batch = replace(batch, advantages=None, behaviour_logprobs=None, ref_logprobs=None, versions=None)
    return batch


@pytest.mark.parametrize(
    "layout", [Parallel(3, pp=3), pytest.param(Parallel(4, tp=2, pp=2), marks=pytest.mark.extended)], ids=str
)
def test_a_stage_computes_the_same_bits_without_what_it_does_not_look_at(checkpoints, layout):
    case = Case(checkpoints["tied"], layout, training={"load_balancing_coef": 0.05} | MICRO_BATCHES)
    for whole, cut in run_ranks(with_and_without, layout.world, case):
        assert torch.equal(whole[0], cut[0]) and whole[0].any()
        assert whole[1] == cut[1]
        assert all(torch.equal(*pair) for pair in zip(whole[2], cut[2], strict=True))
        assert any(flat.any() for flat in cut[2])


def count_plans(rank: int, device: Any, case: Case) -> tuple[dict[str, Any], int]:
    """What a step computes, and how often the host waited for the sizes of an exchange."""
    plans: list[RowExchange] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "plan_exchange", lambda *args: plans.append(plan_exchange(*args)) or plans[-1])
        return train(rank, device, case), len(plans)


def test_a_recomputed_layer_exchanges_what_its_first_pass_did():
    """The host waits once for each layer of a pass, and results are to the bit those without recomputation."""
    folder = tiny_checkpoint(tempfile.mkdtemp(), num_hidden_layers=3)
    results = []
    for recompute in (False, True):
        case = Case(folder, Parallel(2, tp=2, ep=2), training={"load_balancing_coef": 0.0, "recompute": recompute})
        results.append(run_ranks(count_plans, 2, case))
    for (kept, num_kept), (recomputed, num_recomputed) in zip(*results, strict=True):
        assert num_kept == num_recomputed == 2 * 3  # log-probabilities of the policy, and the step's forward pass
        assert kept["steps"] == recomputed["steps"]
        assert all(torch.equal(one, recomputed["weights"][name]) for name, one in kept["weights"].items())
