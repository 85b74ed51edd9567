"""vLLM as the engine samples what the embedded engine samples, whatever happens to its requests."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusion.inference.stop_strings import StopStrings
from fusion.model import Parallel
from tests.helpers import run_ranks
from tests.inference import vllm_engines as scenarios
from tests.inference.engines import by_id, checkpoint

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="bash scripts/environment.sh --backend vllm"),
]

LAYOUTS = {
    "one card": (Parallel(), True),
    "one card, dense": (Parallel(), False),
    "TP2, dense": (Parallel(2, tp=2), False),
    "TP2 with cut experts": (Parallel(2, tp=2, etp=2), True),
    "TP2 EP2": (Parallel(2, tp=2, ep=2), True),
    "EP2: two attention ranks": (Parallel(2, ep=2), True),
    "EP4: four attention ranks": (Parallel(4, ep=4), True),
    "TP2 EP4: two attention ranks of two": (Parallel(4, tp=2, ep=4), True),
}
SINGLE, TWO = Parallel(), Parallel(2, tp=2, ep=2)


def both(scenario, parallel=SINGLE, experts=True, device="emulated", **rollout):
    """What a scenario returns by rank, of each backend."""
    arguments = checkpoint(experts), parallel, scenario, rollout
    results = run_ranks(scenarios.of_both, parallel.world, *arguments, device=device, timeout_s=240)
    return [[of_rank[name] for of_rank in results] for name in ("embedded", "vllm")]


def same(ours, theirs):
    """Checks that both have generated the same, token by token."""
    ours, theirs = by_id(ours), by_id(theirs)
    assert {name: tokens for name, (tokens, _) in ours.items()} == {
        name: tokens for name, (tokens, _) in theirs.items()
    }
    for name, (_, logprobs) in ours.items():
        assert theirs[name][1] == pytest.approx(logprobs, abs=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_samples_the_same_tokens(layout):
    parallel, experts = LAYOUTS[layout]
    ours, theirs = both(scenarios.arriving_in_two_waves, parallel, experts)
    same([output for mine, _ in ours for output in mine], [output for mine, _ in theirs for output in mine])
    for of_ranks in (ours, theirs):  # the kept ids with the tokens that were sampled from a part of the vocabulary
        (filtered,) = (one for mine, _ in of_ranks for one in mine if one.request_id == "filtered")
        assert len(filtered.kept_counts) == len(filtered.tokens)
        assert 4 * sum(filtered.kept_counts) == len(filtered.kept_ids) > 0
    for rank, (mine, _) in enumerate(theirs):
        assert bool(mine) == (parallel.coordinate("tp", rank) == 0)
    embedded, vllm = (of_ranks[0][1] for of_ranks in (ours, theirs))
    assert embedded.keys() == vllm.keys()
    for figure in ("generated_tokens", "decoded_sequences", "dummy_steps", "kv_tokens", "depth", "running"):
        assert vllm[figure] == embedded[figure], figure
    assert (vllm["dummy_steps"] > 0) == (parallel.dp > 1)
    assert vllm["tokens_per_s"] > 0 and vllm["preemptions"] == 0
    statuses = [{name: value for name, value in status.items() if name != "tokens_per_s"} for _, status in theirs]
    assert all(status == statuses[0] for status in statuses)


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
@pytest.mark.parametrize("parallel", [SINGLE, TWO], ids=str)
def test_chunks_aborts_suspension_and_new_versions_change_no_token(parallel, device):
    _, theirs = both(scenarios.broken_off_and_resumed, parallel, device=device)
    whole = by_id(both(scenarios.arriving_in_two_waves)[0][0][0])
    outputs, status = theirs[0]
    assert {output.finish_reason for output in outputs} >= {"abort", "chunk", "length"}
    got: dict[str, tuple[list[int], list[float]]] = {}
    for output in outputs:
        tokens, logprobs = got.setdefault(output.request_id, ([], []))
        assert len(output.tokens) == len(output.logprobs) == len(output.versions)
        assert list(output.before) == tokens
        tokens += output.tokens
        logprobs += output.logprobs
    assert len(got) == 12
    for name, (tokens, logprobs) in got.items():
        assert tokens == whole[name][0], name
        assert logprobs == pytest.approx(whole[name][1], abs=1e-5)
    assert status["generated_tokens"] == sum(len(tokens) for tokens, _ in got.values())
    assert status["recomputed_tokens"] > 0 and status["depth"] == status["running"] == 0


@pytest.mark.parametrize("parallel", [SINGLE, TWO], ids=str)
def test_new_weights_are_adopted_between_two_steps(parallel):
    ours, theirs = both(scenarios.adopting_new_weights, parallel)
    same(ours[0], theirs[0])
    versions = {output.request_id: output.versions for output in theirs[0]}
    assert versions == {output.request_id: output.versions for output in ours[0]}
    assert versions["a0"][:8] == [0] * 8 and versions["a0"][8:] == [3] * 16 and set(versions["after"]) == {3}


def _decode(tokens):
    return "".join(f"<{token}>" for token in tokens)


@pytest.mark.parametrize("parallel", [SINGLE, Parallel(2, tp=2, etp=2)], ids=str)
@pytest.mark.parametrize("masked", [((5, 6), (20, 23), (28, 32)), ((16, 32),)], ids=["holes", "a whole shard"])
def test_ids_without_a_token_are_sampled_by_neither(masked, parallel):
    ours, theirs = both(scenarios.arriving_in_two_waves, parallel, masked_ids=masked)
    outputs = [output for mine, _ in theirs for output in mine]
    same([output for mine, _ in ours for output in mine], outputs)
    tokens = {token for output in outputs for token in output.tokens}
    assert len(tokens) > 10 and not [id for id in tokens if any(start <= id < stop for start, stop in masked)]


def test_requests_end_in_every_way_and_with_the_same_reason(monkeypatch):
    first, _ = both(scenarios.ending_in_every_way)
    string = next(output for output in first[0] if output.request_id == "string")
    strings = StopStrings([_decode(string.tokens[4:6])], _decode)
    ours, theirs = both(scenarios.ending_in_every_way, stop_strings=strings)
    same(ours[0], theirs[0])
    reasons, expected = (
        {o.request_id: (o.finish_reason, o.kv_rank, o.before) for o in side[0]} for side in (theirs, ours)
    )
    assert reasons == expected
    assert {name: reason for name, (reason, _, _) in reasons.items()} == {
        "length": "length",
        "stop": "stop",
        "chunk": "chunk",
        "resumed": "chunk",
        "exact": "stop",
        "exact and long": "length",
        "string": "stop",
    }
    lengths = {output.request_id: len(output.tokens) for output in theirs[0]}
    assert lengths["exact"] == 11 and lengths["string"] == 6 and lengths["resumed"] == 5


def test_requests_of_a_lower_number_are_admitted_first():
    ours, theirs = both(scenarios.in_order_of_priority, max_seqs=1)
    assert theirs[0] == ours[0] == ["p2", "p1", "p4", "p0", "p3"]


@pytest.mark.parametrize("parallel", [SINGLE, TWO], ids=str)
def test_little_kv_preempts_and_changes_no_token(parallel):
    ours, theirs = both(scenarios.crowding_the_kv, parallel, max_kv_tokens=128)
    same(ours[0][0], theirs[0][0])
    status = theirs[0][1]
    assert status["preemptions"] > 0 and status["recomputed_tokens"] > 0 and status["kv_tokens"] == 128


@pytest.mark.parametrize("layout", [name for name, (_, experts) in LAYOUTS.items() if experts])
def test_the_experts_of_every_token_are_those_that_the_embedded_engine_records(layout):
    parallel, _ = LAYOUTS[layout]
    ours, theirs = both(scenarios.arriving_in_two_waves, parallel, routing=True)
    ours, theirs = ({one.request_id: one for mine, _ in side for one in mine} for side in (ours, theirs))
    for name, one in ours.items():
        expected = one.routing.sort(-1).values
        assert one.routing.shape[0] == len(one.prompt) + len(one.tokens) - 1
        assert theirs[name].routing.dtype == one.routing.dtype
        assert torch.equal(theirs[name].routing.sort(-1).values, expected), name
    assert torch.cat([one.routing for one in ours.values()]).unique().numel() > 2


@pytest.mark.parametrize("scenario", ["broken_off_and_resumed", "crowding_the_kv", "adopting_new_weights"])
@pytest.mark.parametrize("parallel", [SINGLE, TWO], ids=str)
def test_no_interruption_changes_the_experts_of_a_token_that_was_sampled(scenario, parallel):
    options = dict(routing=True, max_kv_tokens=128) if scenario == "crowding_the_kv" else dict(routing=True)
    results = both(getattr(scenarios, scenario), parallel, **options)
    found = []
    for side in results:
        routing: dict[str, list[torch.Tensor]] = {}
        for one in side[0] if scenario == "adopting_new_weights" else side[0][0]:
            routing.setdefault(one.request_id, []).append(one.routing)
        found.append({name: torch.cat(pieces).sort(-1).values for name, pieces in routing.items()})
    if scenario == "broken_off_and_resumed":  # the engines break off at other tokens
        whole = both(scenarios.arriving_in_two_waves, routing=True)[0][0][0]
        found[0] = {one.request_id: one.routing.sort(-1).values for one in whole}
    assert found[1] and all(torch.equal(pieces, found[0][name]) for name, pieces in found[1].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_change_no_token(layout):
    parallel, experts = LAYOUTS[layout]
    plain = [output for mine, _ in both(scenarios.arriving_in_two_waves, experts=experts)[0] for output in mine]
    truth = {output.request_id: output.tokens for output in plain}
    options = dict(experts=experts, truth=truth, routing=experts)
    ours, theirs = both(scenarios.arriving_in_two_waves, parallel, **options)
    outputs = [output for mine, _ in theirs for output in mine]
    same([output for mine, _ in ours for output in mine], outputs)
    status = theirs[0][1]
    assert status["drafted_tokens"] > status["accepted_tokens"] > 50
    assert status["generated_tokens"] == sum(len(output.tokens) for output in outputs)
    assert status["decoded_sequences"] == ours[0][1]["decoded_sequences"] - status["accepted_tokens"]
    assert status["preemptions"] == 0
    expected = {one.request_id: one for mine, _ in ours for one in mine}
    for one in outputs if experts else ():
        assert torch.equal(one.routing.sort(-1).values, expected[one.request_id].routing.sort(-1).values)


@pytest.mark.parametrize("parallel", [SINGLE, TWO], ids=str)
def test_drafts_among_interruptions_change_no_token(parallel):
    whole = by_id(both(scenarios.arriving_in_two_waves)[0][0][0])
    truth = {name: tokens for name, (tokens, _) in whole.items()}
    outputs, status = both(scenarios.broken_off_and_resumed, parallel, truth=truth, max_kv_tokens=400)[1][0]
    got: dict[str, list[int]] = {}
    for output in outputs:
        got.setdefault(output.request_id, []).extend(output.tokens)
    assert got == {name: truth[name] for name in got} and len(got) == 12
    assert status["accepted_tokens"] > 20 and status["depth"] == status["running"] == 0


def test_drafts_end_with_the_response_and_preempt_no_other():
    first, _ = both(scenarios.ending_in_every_way)
    truth = {output.request_id: [*output.before, *output.tokens] for output in first[0]}
    string = next(output for output in first[0] if output.request_id == "string")
    strings = StopStrings([_decode(string.tokens[4:6])], _decode)
    ours, theirs = both(scenarios.ending_in_every_way, truth=truth, stop_strings=strings)
    same(ours[0], theirs[0])
    assert {o.request_id: o.finish_reason for o in ours[0]} == {o.request_id: o.finish_reason for o in theirs[0]}
    plain, _ = both(scenarios.crowding_the_kv, max_kv_tokens=128)
    truth = {output.request_id: output.tokens for output in plain[0][0]}
    ours, theirs = both(scenarios.crowding_the_kv, truth=truth, max_kv_tokens=128)
    same(ours[0][0], theirs[0][0])
    assert theirs[0][1]["accepted_tokens"] > 0


def test_our_drafter_proposes_to_vllm_what_siblings_have_said():
    options = dict(source="siblings")
    for parallel in (SINGLE, TWO):
        ours, theirs = both(scenarios.repeating_themselves, parallel, **options)
        same(ours[0][0], theirs[0][0])
        for status in (ours[0][1], theirs[0][1]):
            assert status["drafted_tokens"] >= status["accepted_tokens"] > 50


def test_nan_logits_are_reported_and_harm_no_later_version():
    ours, theirs = both(scenarios.surviving_bad_weights)
    assert "the logits of policy 1 are NaN" in theirs[0][0] and "request 'r" in theirs[0][0]
    same(ours[0][1], theirs[0][1])


def test_kv_is_memory_of_the_card_and_is_given_back():
    _, theirs = both(scenarios.counting_memory, TWO)
    for allocated, released, again in theirs:
        assert allocated == again and allocated - released >= 1024 // 16 * 16 * 2 * 32 * 2 * 4


def test_a_prompt_that_was_computed_before_is_found():
    ours, theirs = both(scenarios.sharing_prompts)
    assert theirs[0] == ours[0] == 80
    assert both(scenarios.sharing_prompts, prefix_cache=False)[1][0] == 0
