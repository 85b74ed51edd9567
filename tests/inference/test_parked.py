"""KV that leaves the card and comes back: to the bit, to the same request, and to nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.inference import Request, SamplingParams
from tests.inference.engines import by_id, generate, requests
from tests.inference.keeping import keeping, long, resumed, steps, suspend_and_return
from tests.offload.memory import free_bytes


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("new_version", [True, False])
def test_with_the_same_weights_nothing_tells_that_it_was_away(prefix_cache, batch_invariant, new_version):
    options = dict(prefix_cache=prefix_cache, batch_invariant=batch_invariant)
    wanted, (made, _) = long(6) + requests(6, max_tokens=60), keeping(**options)
    wanted = [replace(request, id=f"q{i}") for i, request in enumerate(wanted)]
    whole = by_id(generate(keeping(**options)[0], wanted))
    had, again, rounds = {}, wanted, 0
    while again:
        made.submit(again)
        outputs = steps(made, 11)
        again = resumed(wanted, outputs + suspend_and_return(made, new_version), had)
        rounds += 1
    assert {id: tokens for id, (tokens, _) in had.items()} == {id: tokens for id, (tokens, _) in whole.items()}
    for id, (_, logprobs) in whole.items():  # without it, sums are in the order of the blocks' numbers
        assert had[id][1] == (logprobs if batch_invariant else pytest.approx(logprobs, abs=1e-5))
    assert rounds > 4
    status = made.status()
    assert status["recomputed_tokens"] == 0 and status["kv_restored_tokens"] > 1000
    assert made.parked.host_bytes == 0 and made.scheduler.blocks.available == made.scheduler.blocks.count


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_sibling_does_not_share_the_rows_of_one_that_continues_inside_a_block(batch_invariant):
    """Both have the same tokens, as they are greedy; the KV of one was freed, so it computes the whole block itself."""
    params = SamplingParams(max_tokens=40, stop_token_ids=(), temperature=0.0)
    wanted = [Request(f"r{i}", (3, 4, 5) * 9, params, "g") for i in range(2)]
    options = dict(batch_invariant=batch_invariant)
    whole = by_id(generate(keeping(**options)[0], wanted))
    made, had = keeping(**options)[0], {}
    made.submit(wanted)
    again = resumed(wanted, steps(made, 9) + suspend_and_return(made), had)
    made.forget(["r1"])
    assert not resumed(wanted, generate(made, again), had)
    for id, (tokens, logprobs) in whole.items():
        assert had[id] == (tokens, logprobs if batch_invariant else pytest.approx(logprobs, abs=1e-5))


def test_without_keeping_the_same_tokens_are_computed_again():
    made, wanted = keeping(suspended="recompute")[0], long(2)
    made.submit(wanted)
    outputs = steps(made, 10)
    outputs += suspend_and_return(made)
    assert [output.kv_rank for output in outputs] == [None, None] and made.parked.host_bytes == 0
    generate(made, resumed(wanted, outputs))
    # 27 of the prompt and 9 of the response each; the second finds a block of its sibling
    assert made.status()["recomputed_tokens"] == 36 + 36 - 16 and made.status()["kv_restored_tokens"] == 0


def test_parked_kv_is_taken_once_and_its_host_memory_is_used_again():
    made, pool = keeping()
    wanted = long(4)
    made.submit(wanted)
    outputs, held = steps(made, 10), []
    for _ in range(4):
        outputs = suspend_and_return(made)
        assert [output.kv_rank for output in outputs] == [0] * 4
        wanted = [replace(r, response=(*r.response, *o.tokens)) for r, o in zip(wanted, outputs, strict=True)]
        blocks = [-(-(len(request.prompt) + len(request.response) - 1) // 16) for request in wanted]
        assert made.parked.host_bytes == sum(blocks) * made.cache.block_bytes == pool.nbytes - free_bytes(pool)
        held.append(pool.nbytes)
        made.submit(wanted)
        assert not steps(made, 3)
        made.parked.settle()
        assert made.parked.host_bytes == 0 and free_bytes(pool) == pool.nbytes
    assert len(set(held)) == 1


def test_a_request_that_waits_again_before_it_had_a_turn_keeps_what_is_parked():
    made, _ = keeping()
    wanted = long(3)
    whole = by_id(generate(keeping()[0], wanted))
    made.submit(wanted)
    had = {}
    steps(made, 10)
    again = resumed(wanted, suspend_and_return(made), had)
    made.submit(again)
    again = resumed(wanted, suspend_and_return(made), had)
    assert [request.kv_rank for request in again] == [0, 0, 0]
    assert not resumed(wanted, generate(made, again), had) and had == whole
    assert made.status()["recomputed_tokens"] == 0


def test_a_prompt_that_is_half_way_in_goes_on_behind_its_half():
    wanted = [Request("r0", tuple(range(2, 30)) * 7, SamplingParams(max_tokens=9, stop_token_ids=()))]
    options = dict(max_seqs=4, max_batch_tokens=64, batch_invariant=True)
    made = keeping(**options)[0]
    made.submit(wanted)
    assert not steps(made, 2)
    again = resumed(wanted, suspend_and_return(made))
    assert again[0].response == () and again[0].kv_rank == 0
    assert by_id(generate(made, again)) == by_id(generate(keeping(**options)[0], wanted))
    assert made.status()["kv_restored_tokens"] == 128


def test_what_ended_or_went_elsewhere_or_comes_with_other_tokens_is_freed():
    made, pool = keeping()
    wanted = long(4)
    made.submit(wanted)
    steps(made, 10)
    r0, r1, r2, r3 = resumed(wanted, suspend_and_return(made))
    other = replace(r2, response=(*r2.response[:-1], (r2.response[-1] + 1) % 30))
    made.submit([r1, other, replace(r3, id="new")])
    made.abort(["r1"])
    made.forget(["r0", "r3", "nobody's"])
    made.step()
    made.parked.settle()
    assert made.parked.host_bytes == 0 and free_bytes(pool) == pool.nbytes, "r0 and r3 are elsewhere"
    assert made.status()["kv_restored_tokens"] == 0
    made.run()
    assert made.status()["recomputed_tokens"] > 0


def test_what_has_not_come_back_yet_stays_parked_until_it_is_forgotten():
    made, pool = keeping()
    wanted = long(4)
    whole = by_id(generate(keeping()[0], wanted))
    made.submit(wanted)
    had = {}
    again = resumed(wanted, steps(made, 10) + suspend_and_return(made), had)
    made.submit(again[:2])
    resumed(wanted, generate(made, []), had)
    assert made.parked.host_bytes > 0, "the others may still come"
    made.forget(["r3"])
    made.submit([again[2]])
    resumed(wanted, generate(made, []), had)
    assert made.parked.host_bytes == 0 and made.status()["recomputed_tokens"] == 0
    assert {id: tokens for id, (tokens, _) in had.items() if id != "r3"} == {
        id: tokens for id, (tokens, _) in whole.items() if id != "r3"
    }


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("new_version", [True, False])
def test_a_response_in_chunks_is_the_same_and_computes_again_only_what_is_gone(kept, prefix_cache, new_version):
    options = dict(suspended="keep" if kept else "recompute", prefix_cache=prefix_cache, batch_invariant=True)
    wanted = long(4) + [replace(request, id=f"q{i}") for i, request in enumerate(requests(4, max_tokens=60))]
    whole, (made, _) = by_id(generate(keeping(**options)[0], wanted)), keeping(**options)
    wanted = [replace(request, chunk_tokens=13) for request in wanted]
    had, again, ends = {}, wanted, set()
    while again:
        outputs = generate(made, again)
        ends |= {(output.finish_reason, output.kv_rank) for output in outputs}
        assert all(len(output.tokens) == 13 for output in outputs if output.finish_reason == "chunk")
        again = resumed(wanted, outputs, had)
        if new_version:
            made.policy_version += 1
    assert had == whole
    assert {rank for reason, rank in ends if reason == "chunk"} == ({0} if kept or prefix_cache else {None})
    assert {rank for reason, rank in ends if reason != "chunk"} == {None}
    again = made.status()["recomputed_tokens"]
    assert made.status()["kv_restored_tokens"] > 0 if kept else made.status()["kv_restored_tokens"] == 0
    if kept:
        assert again == 0
    elif prefix_cache and not new_version:
        assert 0 < again < 16 * 8 * 5, "less than a block for each chunk"
    assert made.parked.host_bytes == 0 and made.scheduler.blocks.available == made.scheduler.blocks.count


def test_beyond_the_limit_it_is_computed_again_and_the_first_are_kept():
    block = keeping()[0].cache.block_bytes
    wanted = long(10, prompt=tuple(range(2, 30)) * 8, tokens=30)
    made, pool = keeping(max_parked_mib=1)
    each = -(-(len(wanted[0].prompt) + 9) // 16) * block
    assert 1 << 20 < 10 * each, "they do not all fit"
    whole = by_id(generate(keeping()[0], wanted))
    made.submit(wanted)
    had = {}
    again = resumed(wanted, steps(made, 10) + suspend_and_return(made), had)
    kept = (1 << 20) // each
    assert [request.kv_rank for request in again] == [0] * kept + [None] * (10 - kept)
    assert made.parked.host_bytes == kept * each <= 1 << 20
    resumed(wanted, generate(made, again), had)
    assert {id: tokens for id, (tokens, _) in had.items()} == {id: tokens for id, (tokens, _) in whole.items()}
    assert made.status()["recomputed_tokens"] > 0 < made.status()["kv_restored_tokens"]


def test_siblings_that_come_back_share_their_prompt_again():
    made, _ = keeping()
    wanted = long(4, prompt=(7, 8, 9) * 32)
    made.submit(wanted)
    steps(made, 5)
    again = resumed(wanted, suspend_and_return(made, new_version=True))
    made.submit(again)
    made.step()
    blocks = made.scheduler.blocks
    assert blocks.count - blocks.available == 6 + 4


def test_kv_of_older_weights_is_never_found_under_the_new_version():
    prompt, params = (7, 8, 9) * 20, SamplingParams(max_tokens=40, stop_token_ids=())
    for away in (True, False):
        made, _ = keeping()
        wanted = [Request("old", prompt, params)]
        made.submit(wanted)
        steps(made, 10)
        if away:
            made.submit(resumed(wanted, suspend_and_return(made, new_version=True)))
        else:
            made.policy_version = 1
        made.step()
        before = made.scheduler.counters.prefix_hit_tokens
        # The beginning of what the kept one holds, its new tokens included, as a prompt of their own
        tokens = tuple(made.scheduler.running[0].tokens)
        made.submit([Request("new", prompt, params), Request("behind", tokens, params)])
        made.step()
        assert made.scheduler.counters.prefix_hit_tokens - before == 48, "only what the first of these two has computed"
        outputs = {output.request_id: output for output in made.run()}
        made.submit(
            [Request("after", (*outputs["old"].prompt, *outputs["old"].before, *outputs["old"].tokens), params)]
        )
        made.step()
        assert made.scheduler.counters.prefix_hit_tokens - before == 48 + 64, "what `behind` has, and no more"


def test_new_weights_between_two_steps_leave_kept_requests_where_they_are_and_mark_them_mixed():
    made, wanted = keeping(prefix_cache=True)[0], long(2)
    made.submit(wanted)
    steps(made, 8)
    blocks = [list(seq.blocks) for seq in made.scheduler.running]
    try:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()
        made.policy_version = 1
        assert [list(seq.blocks) for seq in made.scheduler.running] == blocks and not made.scheduler.blocks._cached
        outputs = made.run()
    finally:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()
    assert made.status()["recomputed_tokens"] == 0
    for output in outputs:
        assert output.versions == [0] * 8 + [1] * 32


def test_a_kept_sample_goes_on_under_new_weights_behind_old_kv():
    """It differs from both: from what the old weights go on with, and from a prefill under the new ones."""
    params = SamplingParams(max_tokens=40, stop_token_ids=())
    wanted = [Request(f"r{i}", (5, 6, 7, 8 + i) * 8, params) for i in range(4)]
    found = {}
    for choice in ("keep", "recompute"):
        made, _ = keeping(suspended=choice)
        made.submit(wanted)
        had = {}
        again = resumed(wanted, steps(made, 8) + suspend_and_return(made, new_version=True), had)
        try:
            with torch.no_grad():
                made.model.layers["1"].input_norm.mul_(0.5)
            made.submit(again)
            outputs = made.run()
        finally:
            with torch.no_grad():
                made.model.layers["1"].input_norm.mul_(2.0)
        assert all(output.versions == [1] * 32 for output in outputs)
        resumed(wanted, outputs, had)
        found[choice] = had
    assert all(found["keep"][id][1][:8] == found["recompute"][id][1][:8] for id in found["keep"])
    assert all(found["keep"][id][1][8:] != found["recompute"][id][1][8:] for id in found["keep"])


def test_requests_in_the_engine_when_its_memory_goes_find_their_kv_when_it_returns():
    made, _ = keeping()
    wanted = long(5)
    whole = by_id(generate(keeping()[0], wanted))
    made.submit(wanted)
    outputs = steps(made, 10)
    made.release_kv()
    assert made.parked.host_bytes > 0
    made.allocate_kv()
    assert by_id(outputs + made.run()) == whole
    assert made.status()["recomputed_tokens"] == 0 and made.parked.host_bytes == 0


def test_little_kv_preempts_kept_requests_which_are_computed_again():
    wanted = long(6, prompt=(3, 4, 5), tokens=80)
    made, _ = keeping(max_kv_tokens=128)
    whole = by_id(generate(keeping()[0], wanted))
    had, again = {}, wanted
    while again:
        made.submit(again)
        again = resumed(wanted, steps(made, 30) + suspend_and_return(made, new_version=True), had)
    assert {id: tokens for id, (tokens, _) in had.items()} == {id: tokens for id, (tokens, _) in whole.items()}
    status = made.status()
    assert status["preemptions"] > 0 and status["recomputed_tokens"] > 0 and status["kv_restored_tokens"] > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_routing_of_parked_blocks_comes_back_with_them(prefix_cache):
    options = dict(dtype=torch.float64, routing=True, prefix_cache=prefix_cache)
    wanted = long(4)
    whole = {output.request_id: output for output in generate(keeping(**options)[0], wanted)}
    made, _ = keeping(**options)
    made.submit(wanted)
    steps(made, 10)
    suspended = suspend_and_return(made)
    begun = {output.request_id: output.routing for output in suspended}
    outputs = generate(made, resumed(wanted, suspended))
    assert made.status()["kv_restored_tokens"] > 0
    for output in outputs:
        routing = torch.cat([begun[output.request_id], output.routing])
        assert torch.equal(routing, whole[output.request_id].routing)
