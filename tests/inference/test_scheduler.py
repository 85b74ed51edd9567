import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.inference import Request, RolloutConfig, SamplingParams
from fusion.inference.blocks import BlockManager, next_name, root_name
from fusion.inference.placement import place, shares_prompt
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import Sequence
from stalesync.job.overrides import known_keys
from tests.rollouts import rollout_config

SIZE, BLOCKS = 4, 8

request = st.builds(
    lambda head, length, new, done, chunk: (tuple([head] * length), new, done, chunk),
    st.integers(0, 1),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 3),
    st.integers(0, 4),
)


def sequence(name, prompt, new, done, chunk):
    params = SamplingParams(max_tokens=new, stop_token_ids=(9,))
    made = Request(name, prompt, params, response=(5,) * min(done, new - 1), chunk_tokens=chunk)
    return Sequence.of(made, params, ())


def check_step(scheduler, step, before):
    """What the module's docstring promises of a step. ``before``: who ran before it."""
    computed = [(seq, 1) for seq in step.decodes] + step.chunks
    assert sum(count for _, count in computed) <= scheduler.max_batch_tokens
    assert len({id(seq) for seq, _ in computed}) == len(computed)
    assert len(scheduler.running) <= scheduler.max_seqs
    for seq, count in computed:
        assert seq in scheduler.running and seq not in scheduler.waiting
        assert 0 < count <= len(seq.tokens) - seq.computed
        assert len(seq.blocks) == -(-(seq.computed + count) // SIZE)
    chunk_of = {id(seq): count for seq, count in step.chunks}
    for seq, other in step.shared_prefill:
        assert seq in scheduler.running and seq not in before and seq.tokens == other.tokens
        assert other.computed + chunk_of[id(other)] == len(other.tokens), "the other computes its last token now"
        assert other.computed <= seq.computed < len(seq.tokens), "and all that the twin does not share"
        assert len(seq.blocks) == -(-len(seq.tokens) // SIZE)
    writers = [seq for seq, _ in computed] + [seq for seq, _ in step.shared_prefill]
    assert len({id(seq) for seq in writers}) == len(writers)
    written = [b for seq in writers for b in seq.blocks[seq.computed // SIZE :]]
    assert len(written) == len(set(written))  # nobody writes where another writes
    for seq in scheduler.running:
        if seq in before:  # who was admitted now may share what a sibling writes now
            assert not set(seq.blocks[: seq.computed // SIZE]) & set(written)
    filled = [b for seq, first, end in step.restored for b in seq.blocks[first:end]]
    assert len(filled) == len(set(filled)) and not set(filled) & {b for seq in before for b in seq.blocks}
    for seq, first, end in step.restored:
        assert seq in scheduler.running and seq not in before and not seq.parked
        assert first <= end == -(-seq.computed // SIZE)
    for seq in scheduler.running:
        if seq.since != scheduler.version:  # nothing of it is found under the new version
            name, newer = root_name(scheduler.version), []
            for end in range(SIZE, len(seq.tokens) + 1, SIZE):
                newer.append(name := next_name(name, seq.tokens[end - SIZE : end]))
            assert not set(scheduler.blocks.find(newer)) & set(seq.blocks)
    held = {b for seq in scheduler.running for b in seq.blocks}
    assert len(held) + scheduler.blocks.available == BLOCKS
    ending = [s for s, n in step.chunks if s.computed + n == len(s.tokens)]
    assert step.sampled == step.decodes + ending + [s for s, _ in step.shared_prefill]
    if scheduler.unfinished:
        assert step


@settings(max_examples=150)
@given(
    requests=st.lists(request, min_size=1, max_size=8),
    limits=st.sampled_from([(1, 1), (2, 3), (4, 8), (8, 64)]),
    prefix_cache=st.booleans(),
    data=st.data(),
)
def test_everything_added_ends_once_under_any_sequence_of_events(requests, limits, prefix_cache, data):
    max_seqs, max_batch_tokens = limits
    blocks = BlockManager(BLOCKS, SIZE)
    scheduler = Scheduler(blocks, max_seqs=max_seqs, max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache)
    todo = [sequence(f"r{i}", *one) for i, one in enumerate(requests)]
    limit = {seq.request.id: (seq.limit, len(seq.tokens)) for seq in todo}
    outputs = []
    for _ in range(2000):
        while todo and (not scheduler.unfinished or data.draw(st.booleans())):
            scheduler.add(todo.pop())
        event = data.draw(st.integers(0, 30))
        if event == 0:
            outputs += scheduler.abort(lambda request: request.id == "r0")
        elif event == 1:
            scheduler.restart(version=scheduler.version + 1)
            assert not scheduler.running and scheduler.blocks.available == BLOCKS
        elif event == 2:
            running = [(seq, list(seq.blocks)) for seq in scheduler.running]
            scheduler.change_version(scheduler.version + 1)
            assert running == [(seq, list(seq.blocks)) for seq in scheduler.running] and not scheduler.blocks._cached
        elif event in (3, 4):  # memory goes, and some KV is parked, some is not
            for seq in scheduler.running:
                seq.parked = seq.computed * data.draw(st.integers(0, 1))
            scheduler.restart(version=scheduler.version + data.draw(st.integers(0, 1)))
        oldest = scheduler.running[0] if scheduler.running else None
        progress = oldest and (oldest.computed, len(oldest.tokens))
        before = list(scheduler.running)
        step = scheduler.schedule()
        check_step(scheduler, step, before)
        outputs += scheduler.commit(
            step, [9 if data.draw(st.integers(0, 9)) == 0 else 3 for _ in step.sampled], [0.0] * len(step.sampled)
        )
        if oldest in scheduler.running:
            assert (oldest.computed, len(oldest.tokens)) > progress
        if not todo and not scheduler.unfinished:
            break
    assert sorted(o.request_id for o in outputs) == sorted(limit)
    assert scheduler.blocks.available == BLOCKS
    for output in outputs:
        end, begun = limit[output.request_id]
        assert len(output.tokens) == len(output.logprobs) == len(output.versions)
        assert output.versions == sorted(output.versions)
        if output.finish_reason == "stop":
            assert output.tokens[-1] == 9
        elif output.finish_reason in ("length", "chunk"):
            assert begun + len(output.tokens) == end


def test_a_block_that_was_parked_before_it_was_full_is_not_found_by_a_sibling():
    blocks = BlockManager(BLOCKS, SIZE)
    scheduler = Scheduler(blocks, max_seqs=2, max_batch_tokens=1)
    first = sequence("first", (0,) * 5, 1, 0, 0)
    scheduler.add(first)
    scheduler.commit(scheduler.schedule(), [], [])
    first.parked = first.computed
    assert first.parked == 1
    scheduler.restart()
    step = scheduler.schedule()
    assert step.restored == [(first, 0, 1)] and step.chunks == [(first, 1)]
    assert not blocks.find([next_name(root_name(0), (0,) * SIZE)]), "it holds two of four tokens"


@settings(max_examples=50)
@given(requests=st.lists(request, min_size=1, max_size=6), seed=st.integers(0, 3))
def test_a_schedule_is_a_function_of_its_inputs(requests, seed):
    def record():
        scheduler = Scheduler(BlockManager(BLOCKS, SIZE), max_seqs=4, max_batch_tokens=8)
        for i, one in enumerate(requests):
            scheduler.add(sequence(f"r{i}", *one))
        steps = []
        while scheduler.unfinished:
            step = scheduler.schedule()
            rows = [(s.request.id, 1) for s in step.decodes] + [(s.request.id, n) for s, n in step.chunks]
            steps.append((rows, [list(s.blocks) for s in scheduler.running]))
            scheduler.commit(step, [seed] * len(step.sampled), [0.0] * len(step.sampled))
        return steps

    assert record() == record()


def test_decodes_go_before_prefill_and_nobody_overtakes():
    scheduler = Scheduler(BlockManager(64, SIZE), max_seqs=4, max_batch_tokens=8)
    scheduler.add(sequence("short", (1,), 8, 0, 0))
    scheduler.add(sequence("long", (2,) * 16, 8, 0, 0))
    scheduler.add(sequence("late", (3,), 8, 0, 0))
    step = scheduler.schedule()
    assert [(s.request.id, n) for s, n in step.chunks] == [("short", 1), ("long", 7)]
    scheduler.commit(step, [1], [0.0])
    step = scheduler.schedule()
    assert [s.request.id for s in step.decodes] == ["short"]
    assert [(s.request.id, n) for s, n in step.chunks] == [("long", 7)]
    scheduler.commit(step, [1], [0.0])
    step = scheduler.schedule()
    assert [(s.request.id, n) for s, n in step.chunks] == [("long", 2), ("late", 1)]


def test_prefill_takes_a_block_from_a_younger_decode_that_was_already_scheduled():
    scheduler = Scheduler(BlockManager(3, SIZE), max_seqs=4, max_batch_tokens=5)
    scheduler.add(sequence("old", (2,) * 9, 2, 0, 0))
    scheduler.add(sequence("young", (1,), 6, 0, 0))
    first = scheduler.schedule()
    assert [(s.request.id, n) for s, n in first.chunks] == [("old", 5)]
    scheduler.commit(first, [], [])
    scheduler.running.append(scheduler.waiting.popleft())  # as if it had been admitted when there was room
    young = scheduler.running[-1]
    young.blocks.extend(scheduler.blocks.take(1))
    young.computed, young.tokens = 1, [1, 1]
    step = scheduler.schedule()
    assert step.decodes == [] and [(s.request.id, n) for s, n in step.chunks] == [("old", 4)]
    assert scheduler.counters.preemptions == 1 and list(scheduler.waiting) == [young] and young.tokens == [1, 1]


@given(
    loads=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    wanted=st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c"]), st.one_of(st.none(), st.integers(0, 6))), max_size=30
    ),
    apart=st.sampled_from(["", "a"]),
)
def test_placement_is_even_and_keeps_kv_and_siblings_together_as_far_as_it_is(loads, wanted, apart):
    requests = [Request(f"r{i}", (1,), group=group, kv_rank=home) for i, (group, home) in enumerate(wanted)]
    groups = [group for group, _ in wanted]
    placed = place(loads, requests, [group != apart for group in groups])
    share = -(-(sum(loads) + len(groups)) // len(loads))
    after = list(loads)
    for rank in placed:
        after[rank] += 1
    assert len(placed) == len(groups)
    assert all(new <= max(share, old) for new, old in zip(after, loads, strict=True))
    for rank, (_, home) in zip(placed, wanted, strict=True):
        assert rank == home or home is None or home >= len(loads) or after[home] >= share, "it had no room left"
    returning = {i for i, (_, home) in enumerate(wanted) if home is not None and placed[i] == home}
    for group in set(groups) - {"", apart}:
        homes = {rank for i, rank in enumerate(placed) if groups[i] == group and i not in returning}
        assert sum(after[rank] < share for rank in homes) <= 1  # it left a rank only when that was full


def test_whole_groups_go_to_one_rank_when_they_divide_evenly():
    requests = [Request(f"r{i}", (1,), group=f"g{i // 4}") for i in range(32)]
    together, apart = (place([0] * 4, requests, [shares] * 32) for shares in (True, False))
    assert all(len(set(together[i : i + 4])) == 1 for i in range(0, 32, 4))
    assert all(len(set(apart[i : i + 4])) == 4 for i in range(0, 32, 4))
    assert [together.count(rank) for rank in range(4)] == [apart.count(rank) for rank in range(4)] == [8] * 4


def test_siblings_are_apart_where_their_prompt_is_short_and_they_are_not_placed_again():
    assert [shares_prompt(n, 320, placed_again=False) for n in (1, 10, 11, 400)] == [False, False, True, True]
    assert shares_prompt(1, 320, placed_again=True)


def test_config_names_the_key_of_a_value_out_of_range():
    RolloutConfig().validate()
    refused = dict(
        temperature=-1, top_p=0.0, top_k=-2, min_p=1.5, max_response_length=0, block_size=24, max_seqs=0,
        max_batch_tokens=8, kv_fraction=1.5, max_kv_tokens=0, max_length=0, suspended="drop", max_parked_mib=0,
        chunk_tokens=0,
    )  # fmt: skip
    for key, value in (*refused.items(), ("block_size", 1 << 40)):
        try:
            rollout_config(**{key: value}).validate()
        except ValueError as error:
            (name,) = [one for one in known_keys() if one.startswith("rollout.") and one.rpartition(".")[2] == key]
            assert str(error).startswith(f"{name}={value!r}: expected "), error
        else:
            raise AssertionError(key)


def test_siblings_that_are_admitted_together_compute_their_prompt_once():
    scheduler = Scheduler(BlockManager(20, SIZE), max_seqs=8, max_batch_tokens=64)
    for name, length in (("a", 6), ("b", 6), ("c", 8), ("d", 6), ("e", 8)):
        scheduler.add(sequence(name, (0,) * length, 3, 0, 0))
    step = scheduler.schedule()
    assert [(s.request.id, n) for s, n in step.chunks] == [("a", 6), ("c", 4)]
    assert [(s.request.id, other.request.id) for s, other in step.shared_prefill] == [
        ("b", "a"),
        ("d", "a"),
        ("e", "c"),
    ]
    assert scheduler.counters.prefix_hit_tokens == 6 + 4 + 6 + 8, "b, then the first block of c, d, e"
    scheduler.commit(step, [3] * 5, [0.0] * 5)
    assert [seq.computed for seq in scheduler.running] == [6, 6, 8, 6, 8]
    blocks = [list(seq.blocks) for seq in scheduler.running]
    assert len({table[0] for table in blocks}) == 1 and len({table[1] for table in blocks}) == 5


def test_a_prompt_that_is_computed_in_two_steps_and_one_without_a_prefix_cache_share_no_prefill():
    for options in (dict(max_batch_tokens=4), dict(max_batch_tokens=64, prefix_cache=False)):
        scheduler = Scheduler(BlockManager(20, SIZE), max_seqs=8, **options)
        for name in "ab":
            scheduler.add(sequence(name, (0,) * 6, 3, 0, 0))
        assert not scheduler.schedule().shared_prefill


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_that_goes_on_where_a_response_ended_finds_its_blocks(prefix_cache):
    """Also those that were filled while tokens were decoded."""
    scheduler = Scheduler(BlockManager(20, SIZE), max_seqs=8, max_batch_tokens=64, prefix_cache=prefix_cache)
    scheduler.add(sequence("a", (0,) * SIZE, 2 * SIZE, 0, 0))
    while scheduler.unfinished:
        step = scheduler.schedule()
        scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
    scheduler.add(sequence("b", (0,) * SIZE + (3,) * SIZE + (1, 2), 2, 0, 0))
    ((_, count),) = scheduler.schedule().chunks
    assert count == (2 if prefix_cache else 2 * SIZE + 2)


def test_siblings_find_a_prompt_that_was_computed_token_by_token():
    scheduler = Scheduler(BlockManager(20, SIZE), max_seqs=1, max_batch_tokens=1)
    for name in "ab":
        scheduler.add(sequence(name, (0,) * (2 * SIZE + 1), 1, 0, 0))
    computed = []
    while scheduler.unfinished:
        step = scheduler.schedule()
        computed += [seq.request.id for seq in (*step.decodes, *(seq for seq, _ in step.chunks))]
        scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
    assert computed == ["a"] * (2 * SIZE + 1) + ["b"]


def test_a_request_is_admitted_where_all_of_it_fits_and_not_its_first_chunk_alone():
    scheduler = Scheduler(BlockManager(4, SIZE), max_seqs=2, max_batch_tokens=SIZE)
    scheduler.add(sequence("a", (0,) * SIZE, 4, 0, 0))
    for _ in range(2):  # a prefill, and a token in a second block
        step = scheduler.schedule()
        scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
    scheduler.add(sequence("b", (1,) * (3 * SIZE), 1, 0, 0))
    chunks = []
    while scheduler.unfinished:
        step = scheduler.schedule()
        chunks += [(len(scheduler.running), count) for _, count in step.chunks]
        scheduler.commit(step, [3] * len(step.sampled), [0.0] * len(step.sampled))
    assert chunks == [(1, SIZE)] * 3 and not scheduler.counters.preemptions
