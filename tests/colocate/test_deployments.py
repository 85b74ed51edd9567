"""Two steps in every deployment, each card a rank: who holds what when, and that the deployment changes no result.

Asynchronous work is as late as synchronisation allows in all runs but the one the others are compared with.
"""

from dataclasses import replace

import pytest

from fusion.colocate import InferenceShare
from fusion.inference import EmbeddedEngine
from fusion.model import Transformer, load_weights
from tests.colocate.cards import Card, make_spec, tiny_reward_model
from tests.helpers import run_ranks, tiny_checkpoint

X, Y = {"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}
"""Layouts of two cards, for training and for generation."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(folder / "policy"), tiny_reward_model(folder / "reward")


def two_steps(rank, device, spec):
    card = Card(rank, device, spec)
    return [card.step(0), card.step(1)]


def changing_steps(rank, device, spec, *shares):
    card = Card(rank, device, spec)
    start = InferenceShare.of(spec.rollout, len(spec.engines))
    steps = []
    for version, changes in enumerate(shares):
        steps.append(card.step(version, replace(start, **changes)))
        steps[-1]["phase"] = card.worker.phases.phase.value
        steps[-1]["kv_tokens"] = card.worker.card.engine.capacity_tokens if card.worker.card.engine else None
    return steps


def run(paths, npus, train=X, infer=Y, device="adversarial", **fusion):
    policy, reward = paths
    return run_ranks(two_steps, npus, make_spec(policy, npus, train, infer, reward, **fusion), device=device)


def facts(ranks):
    """What must not depend on the deployment: both steps as rank 0, which trains, saw them."""
    return [{name: value for name, value in step.items() if name != "memory"} for step in ranks[0]]


@pytest.fixture(scope="module")
def colocated(paths):
    return run(paths, 2, device="emulated")


def test_a_colocated_card_generates_without_anything_of_training(colocated):
    for steps in colocated:
        for step in steps:
            memory = step["memory"]
            assert memory["infer"]["optimizer"] == memory["infer"]["gradients"] == 0 and memory["infer"]["kv"] > 0
            assert memory["train"]["kv"] == 0 and memory["train"]["optimizer"] > 0
            assert memory["reference"]["optimizer"] == 0, "the reference computes in the room the optimizer leaves"
            assert memory["reference"]["weights"] > 1.5 * memory["train"]["weights"], "beside the actor"
    first, second = facts(colocated)
    assert first["weights"] != second["weights"] and len(first["scores"]) == 8


def test_late_copies_and_collectives_change_nothing(paths, colocated):
    assert facts(run(paths, 2)) == facts(colocated)


def test_separate_cards_see_the_same_rewards_and_keep_to_their_own(paths, colocated):
    separate = run(paths, 4, deployment="separate")
    assert facts(separate) == facts(colocated)
    for rank, steps in enumerate(separate):
        for step in steps:
            memory = step["memory"]
            if rank < 2:
                assert memory["infer"]["kv"] == 0 and memory["infer"]["optimizer"] > 0, "training goes nowhere"
                assert memory["infer"]["weights"] == memory["train"]["weights"]
            else:
                assert memory["infer"]["kv"] > 0 and "train" not in memory
                assert memory["infer"]["optimizer"] == memory["infer"]["gradients"] == 0


def test_hybrid_cards_generate_with_engines_more(paths, colocated):
    hybrid = run(paths, 4, deployment="hybrid")
    assert [step["tokens"] for step in facts(hybrid)] == [step["tokens"] for step in facts(colocated)]
    for rank, steps in enumerate(hybrid):
        assert all(step["memory"]["infer"]["kv"] > 0 for step in steps)
        assert ("train" in steps[0]["memory"]) == (rank < 2)


@pytest.mark.parametrize("resident", ["one", pytest.param("all", marks=pytest.mark.extended)])
def test_four_roles_share_every_card_in_full(paths, colocated, resident):
    full = run(paths, 2, deployment="full", resident=resident)
    assert facts(full) == facts(colocated)
    for steps in full:
        for step in steps:
            memory, actor = step["memory"], colocated[0][0]["memory"]["train"]["weights"]
            if resident == "one":
                assert memory["train"]["weights"] == memory["switched"]["weights"] == actor
                assert memory["reference"]["weights"] == actor, "the reference in the actor's place"
            else:
                assert memory["reference"]["weights"] == memory["train"]["weights"] > 2 * actor


def test_roles_with_cards_of_their_own_say_the_same(paths, colocated):
    apart = run(paths, 4, score_cards=2)
    for ours, theirs in zip(facts(apart), facts(colocated), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-5)
        assert ours["reference"] == pytest.approx(theirs["reference"], abs=1e-5)
    assert "train" not in apart[3][0]["memory"] and apart[0][0]["memory"]["train"]["optimizer"] > 0


@pytest.mark.parametrize(
    "fusion",
    [
        pytest.param({}, id="on the trainer"),
        pytest.param({"score_cards": 2}, id="on cards of its own", marks=pytest.mark.extended),
    ],
)
def test_engine_and_reference_mask_ids_without_a_token(paths, fusion):
    policy, reward = paths
    npus = 4 if fusion else 2
    spec = replace(make_spec(policy, npus, X, Y, reward, **fusion), masked_ids=((5, 7), (16, 32)))
    steps = facts(run_ranks(two_steps, npus, spec))
    for step in steps:
        assert {5, 6}.isdisjoint(step["tokens"]) and max(step["tokens"]) < 16
        assert max(map(abs, step["reference"])) < 100
    first = steps[0]
    assert first["reference"] == pytest.approx(first["logprobs"], abs=1e-5), "before the first update both are equal"


@pytest.mark.parametrize(
    ("train", "infer", "fusion"),
    [
        pytest.param({"ep": 4}, {"tp": 4}, {"deployment": "full"}, marks=pytest.mark.extended),
        pytest.param({"tp": 2, "pp": 2}, {"ep": 4}, {}, marks=pytest.mark.extended),
        ({"tp": 2, "pp": 2, "ep": 2}, {"pp": 2, "tp": 2}, {"deployment": "full", "resident": "one"}),
        pytest.param({"pp": 2}, {"ep": 2, "etp": 1}, {"deployment": "separate"}, marks=pytest.mark.extended),
        ({"tp": 2, "cp": 2, "ep": 2}, {"ep": 4}, {}),
        pytest.param({"cp": 2, "pp": 2}, {"ep": 4}, {"deployment": "full"}, marks=pytest.mark.extended),
        pytest.param({"cp": 2, "ep": 2}, {"ep": 2}, {"deployment": "separate"}, marks=pytest.mark.extended),
        pytest.param({"cp": 2}, {"ep": 2}, {"deployment": "hybrid"}, marks=pytest.mark.extended),
        pytest.param({"cp": 2}, {"ep": 2}, {"score_cards": 2}, marks=pytest.mark.extended),
    ],
)
def test_other_layouts_agree_in_the_first_step(paths, colocated, train, infer, fusion):
    other = run(paths, 4, train, infer, **fusion)
    ours, theirs = facts(other), facts(colocated)
    assert ours[0]["tokens"] == theirs[0]["tokens"]
    for name in ("logprobs", "scores", "reference"):
        assert ours[0][name] == pytest.approx(theirs[0][name], abs=1e-5), name
    assert ours[1]["logprobs"] == pytest.approx(theirs[1]["logprobs"], abs=1e-3), "after a step of the optimizer"


def said_by_both(rank, device, spec, folder):
    """After a step of training: what the engine of the next phase says greedily, and one loaded fresh in its place."""
    card = Card(rank, device, spec)
    worker = card.worker
    card.step(0)
    worker.snapshot()
    worker.save(f"{folder}/checkpoint", f"{folder}/hf")
    worker.switch("infer", 1)
    params = replace(spec.rollout.sampling_params(), temperature=0.0)
    requests = [replace(request, params=params) for request in card.requests(1, 0, 1)] if rank == 0 else []
    if requests:
        worker.card.engine.submit(requests)
    after = worker.card.engine.run()
    worker.switch("train")
    mesh = worker.card.meshes.engine
    model = Transformer(worker.card.weights.config, mesh, device, spec.model.torch_dtype, bucket_bytes=1 << 14)
    load_weights(model, f"{folder}/hf")
    fresh = EmbeddedEngine(model, mesh, device, spec.rollout, spec.seed)
    fresh.allocate_kv()
    if requests:
        fresh.submit(requests)
    return [[(one.request_id, one.tokens, one.logprobs) for one in outputs] for outputs in (after, fresh.run())]


@pytest.mark.parametrize(
    ("train", "infer"),
    [
        ({"tp": 2}, {"ep": 2}),
        pytest.param({"ep": 2}, {"tp": 2, "etp": 2}, marks=pytest.mark.extended),
        pytest.param({"pp": 2}, {"tp": 2, "ep": 2}, marks=pytest.mark.extended),
    ],
)
def test_the_engine_after_a_switch_speaks_as_one_loaded_fresh(paths, tmp_path, train, infer):
    spec = make_spec(paths[0], 2, train, infer)
    ranks = run_ranks(said_by_both, 2, spec, str(tmp_path), device="adversarial")
    after, fresh = (sorted(one for outputs in engine for one in outputs) for engine in zip(*ranks, strict=True))
    assert len(after) == 8 and after == fresh, "token for token, logprob for logprob"


@pytest.mark.parametrize("deployment", [pytest.param("colocated", marks=pytest.mark.extended), "hybrid"])
def test_which_cards_generate_and_with_how_much_changes_between_two_steps(paths, colocated, deployment):
    policy, reward = paths
    parts = {"colocated": ({"tp": 2, "ep": 4}, 4), "hybrid": (X, 4)}
    train, npus = parts[deployment]
    spec = make_spec(policy, npus, train, Y, reward, deployment=deployment)
    shares = [{"engines": (1,), "max_seqs": 2}, {}, {"engines": (0,)}]
    ranks = run_ranks(changing_steps, npus, spec, *shares)
    assert ranks[0][0]["tokens"] == colocated[0][0]["tokens"], "what generates does not change what is sampled"
    first, second, third = zip(*ranks, strict=True)
    kv = [[step["memory"]["infer"]["kv"] > 0 for step in steps] for steps in (first, second, third)]
    assert kv == [[False, False, True, True], [True] * 4, [True, True, False, False]]
    assert [step["kv_tokens"] for step in first[2:]] == [128, 128], "two sequences of at most 64 tokens"
    assert second[2]["kv_tokens"] == 1024
    idle = first[0]["memory"]["infer"]
    assert idle["optimizer"] == 0
    if deployment == "colocated":
        assert idle["weights"] == 0, "an idle card's share is lent to the engines that run"
    else:
        assert idle["weights"] == first[0]["memory"]["train"]["weights"], "no engine needs the cards that train"
        assert third[2]["memory"]["infer"]["weights"] == 0 and third[2]["phase"] == "standby"
