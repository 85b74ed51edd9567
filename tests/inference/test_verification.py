"""Drafts change how many tokens a forward pass yields, and nothing else."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.inference import SamplingParams
from fusion.inference.noise import request_key, uniforms
from fusion.inference.request import Request
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Draft, Verification
from fusion.model import PackedAttention
from tests.inference.engines import by_id, engine, generate, generate_brokenly, model, requests
from tests.pairwise import thinned

SIZE = 4


class Guesses:
    """Drafts random trees around what each request will say, and wrong tokens. Depends only on its calls."""

    def __init__(self, truth: dict[str, list[int]], right: float = 0.7, children: int = 3, seed: int = 0):
        self.truth, self.right, self.children = truth, right, children
        self.draw = random.Random(seed)

    def adopt(self, version): ...

    def drafts_update(self):
        return b""

    def read(self, news): ...

    def observe(self, verified): ...

    def end(self, seq): ...

    def draft(self, sequences, max_depth, max_tokens):
        drafts = []
        for seq, depth in zip(sequences, max_depth, strict=True):
            count = min(self.draw.randrange(0, 9), max_tokens)
            drafts.append(self.tree(seq, depth, count))
            max_tokens -= len(drafts[-1].tokens) if drafts[-1] else 0
        return drafts

    def tree(self, seq: Sequence, max_depth: int, count: int) -> Draft | None:
        said = self.truth[seq.request.id][len(seq.tokens) - seq.first_token :]
        tokens, parents, depths, right = [], [], [], []
        for _ in range(count):
            parent = self.draw.randrange(max(-1, len(tokens) - 4), len(tokens))
            depth = 0 if parent < 0 else depths[parent] + 1
            on_path = parent < 0 or right[parent]
            is_right = on_path and depth < len(said) and self.draw.random() < self.right
            token = said[depth] if is_right else self.draw.randrange(2, 32)
            siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if depth >= max_depth or token in siblings or len(siblings) >= self.children:
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            right.append(on_path and depth < len(said) and token == said[depth])
        return Draft(tokens, parents) if tokens else None


def truth_of(made) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, _) in made.items()}


PARAMS = {
    "plain": dict(),
    "greedy": dict(temperature=0.0),
    "top_p": dict(temperature=0.7, top_p=0.9),
    "top_k": dict(top_k=8),
    "min_p": dict(min_p=0.05),
}


@pytest.mark.parametrize(
    ("params", "children", "operators"),
    thinned(list(product(PARAMS, (1, 3), ("fused", "composed"))), factors=lambda case: case, rest=pytest.mark.extended),
    indirect=["operators"],
)
def test_tokens_and_logprobs_are_those_without_drafts_to_the_bit(params, children, operators):
    wanted = requests(count=9, max_tokens=40, **PARAMS[params])
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    drafted = engine(batch_invariant=True)
    drafted.scheduler.drafter = Guesses(truth_of(plain), children=children)
    assert by_id(generate(drafted, wanted)) == plain
    scheduler = drafted.scheduler
    assert 0 < scheduler.counters.accepted_tokens < scheduler.counters.drafted_tokens
    assert scheduler.counters.generated_tokens == sum(len(tokens) for tokens, _ in plain.values())
    assert scheduler.blocks.available == scheduler.blocks.count, "no block is lost"


def test_tokens_are_those_without_drafts_where_the_batch_decides_how_a_row_is_computed(operators):
    wanted = requests(count=12, max_tokens=60)
    plain = by_id(generate(engine(), wanted))
    drafted = engine()
    drafted.scheduler.drafter = Guesses(truth_of(plain))
    found = by_id(generate(drafted, wanted))
    assert truth_of(found) == truth_of(plain)
    for name, (_, logprobs) in found.items():
        assert logprobs == pytest.approx(plain[name][1], abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_aborts_new_weights_and_little_memory_change_no_token(seed, operators):
    wanted = requests(count=9, max_tokens=30)
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    drafted = engine(batch_invariant=True, max_kv_tokens=(512, 256, 192)[seed], max_batch_tokens=64)
    drafted.scheduler.drafter = Guesses(truth_of(plain), right=0.9)
    assert generate_brokenly(drafted, wanted, seed) == plain
    assert drafted.scheduler.counters.accepted_tokens > 0


def test_right_drafts_save_forward_passes():
    wanted = requests(count=3, max_tokens=41, stop_token_ids=())
    plain = by_id(generate(engine(), wanted))

    class Right(Guesses):
        def draft(self, sequences, max_depth, max_tokens):
            return [self.line(seq, min(depth, 7)) for seq, depth in zip(sequences, max_depth, strict=True)]

        def line(self, seq, depth):
            said = self.truth[seq.request.id][len(seq.tokens) - seq.first_token :][:depth]
            return Draft(said, range(-1, len(said) - 1))

    drafted = engine()
    drafted.scheduler.drafter = Right(truth_of(plain))
    drafted.submit(wanted)
    outputs, steps = drafted.step(), 1
    while not drafted.idle:
        outputs += drafted.step()
        steps += 1
    assert truth_of(by_id(outputs)) == truth_of(plain)
    assert steps - 1 == 1 + 5, "a first token, then five times eight"


def test_a_rejected_draft_leaves_no_block_that_another_request_finds():
    prompt = tuple(random.Random(0).randrange(2, 32) for _ in range(30))
    wrong = [5] * 40
    made = engine(max_seqs=4)

    class Wrong(Guesses):
        def draft(self, sequences, max_depth, max_tokens):
            return [Draft(wrong[:depth], range(-1, min(depth, 40) - 1)) for depth in max_depth]

    made.scheduler.drafter = Wrong({})
    params = SamplingParams(max_tokens=60, stop_token_ids=())
    made.submit([Request("a", prompt, params)])
    for _ in range(3):
        made.step()
    (seq,) = made.scheduler.running
    other = Sequence.of(Request("b", tuple(seq.tokens) + tuple(wrong), params), params, ())
    hits = made.scheduler._find_prefix(other)
    assert len(hits) == seq.computed // made.config.engine.block_size


def test_a_sequence_ends_inside_its_draft_as_without_one():
    wanted = requests(count=6, max_tokens=50, seed=3)
    plain = generate(engine(batch_invariant=True), wanted)
    stops = {output.tokens[len(output.tokens) // 2] for output in plain}
    wanted = requests(count=6, max_tokens=50, seed=3, stop_token_ids=tuple(stops))
    plain = generate(engine(batch_invariant=True), wanted)
    assert {output.finish_reason for output in plain} == {"stop"}
    drafted = engine(batch_invariant=True)
    drafted.scheduler.drafter = Guesses(truth_of(by_id(plain)), right=1.0)
    found = generate(drafted, wanted)
    assert by_id(found) == by_id(plain) and {output.finish_reason for output in found} == {"stop"}


def test_routing_is_that_of_the_tokens_that_were_kept():
    wanted = requests(count=6, max_tokens=30)
    plain = {o.request_id: o for o in generate(engine(batch_invariant=True, routing=True), wanted)}
    drafted = engine(batch_invariant=True, routing=True)
    drafted.scheduler.drafter = Guesses({name: output.tokens for name, output in plain.items()})
    for output in generate(drafted, wanted):
        assert output.tokens == plain[output.request_id].tokens
        assert output.routing.equal(plain[output.request_id].routing)
    assert drafted.scheduler.counters.accepted_tokens > 0


trees = st.integers(1, 12).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))))


@settings(max_examples=200)
@given(parents=trees, length=st.integers(1, 11), data=st.data())
def test_rows_lie_path_by_path_and_follow_keeps_the_path_that_was_sampled(parents, length, data):
    # A token says where its node is: all children of a parent differ.
    draft = Draft([100 + i for i in range(len(parents))], parents)
    seq = Sequence.of(Request("a", (1,) * length, SamplingParams(max_tokens=99)), SamplingParams(max_tokens=99), ())
    one = Verification.of(seq, draft, SIZE)
    assert sorted(one.tokens[1:]) == list(draft.tokens) and one.tokens[0] == 1
    for row in range(1, len(one)):
        node = one.tokens[row] - 100
        parent = one.tokens[one.parents[row]] - 100 if one.parents[row] else -1
        assert one.parents[row] < row and parent == parents[node]
        assert one.depths[row] == one.depths[one.parents[row]] + 1
    assert [path.start for path in one.paths] == [0, *(path.stop for path in one.paths[:-1])]
    for path in one.paths:
        whole = one.shared[path.number] + list(range(path.start, path.stop))
        assert [one.depths[row] for row in whole] == list(range(len(whole))), "a path is without gaps"
        assert all(one.parents[row] == before for before, row in zip(whole, whole[1:], strict=False))
        assert one.first * SIZE + one.blocks_of_tail(path.number, SIZE) * SIZE > length - 1 + one.depths[whole[-1]]
    path = data.draw(st.sampled_from(one.paths))
    whole = one.shared[path.number] + list(range(path.start, path.stop))
    kept = data.draw(st.integers(1, len(whole)))
    sampled = [0] * len(one)
    for row, behind in zip(whole[: kept - 1], whole[1:], strict=False):
        sampled[row] = one.tokens[behind]
    assert one.follow(sampled) == whole[:kept]
    assert whole[:kept] == one.shared[one.path_of(whole[kept - 1])] + list(
        range(one.paths[one.path_of(whole[kept - 1])].start, whole[kept - 1] + 1)
    )


@pytest.mark.slow
def test_where_the_batch_decides_how_a_row_is_computed_tokens_differ_only_where_two_are_within_rounding(operators):
    """Of at least 100,000 tokens. A response is compared up to the first token that differs, where the number drawn
    must lie within rounding of the boundary between both tokens."""
    params = SamplingParams(max_tokens=64, stop_token_ids=())
    draw, wanted = random.Random(1), []
    for number in range(1700):
        prompt = tuple(draw.randrange(2, 32) for _ in range(draw.randrange(1, 40)))
        wanted.append(Request(f"m{number}", prompt, params, group=f"g{number}"))
    plain_engine, drafted = engine(), engine()
    plain = by_id(generate(plain_engine, wanted))
    drafted.scheduler.drafter = Guesses(truth_of(plain), right=0.8)
    found, compared, different = by_id(generate(drafted, wanted)), 0, 0
    exact = model(torch.float64)
    for request in wanted:
        said, other = plain[request.id][0], found[request.id][0]
        same = next((n for n, pair in enumerate(zip(said, other, strict=True)) if pair[0] != pair[1]), len(said))
        compared += min(same + 1, len(said))
        if same == len(said):
            continue
        different += 1
        ids = torch.tensor(request.prompt + tuple(said[:same]), device=exact.device.torch_device)
        with torch.no_grad():
            hidden = exact(ids, torch.arange(len(ids), device=ids.device), PackedAttention([len(ids)], exact.operators))
            reached = exact.head.logits(hidden[-1:]).softmax(-1).cumsum(-1)[0].cpu()
        (number,) = uniforms(5, np.array([request_key(request.id)], np.uint64), np.array([len(ids)]))
        lower = min(said[same], other[same])
        assert abs(number - reached[lower].item()) < 1e-5, (request.id, same)
    print(f"{different} of {compared} tokens differ")
    assert compared >= 100_000 and drafted.scheduler.counters.accepted_tokens > 10_000
