"""The drafter in an engine: the same samples in fewer forward passes, history of the prompt's last group, bounded
memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from fusion.inference import Request, SamplingParams
from fusion.inference.config import DraftsConfig
from fusion.inference.request import NO_REWARDS, LastRewards
from fusion.inference.sequence import Sequence
from fusion.rollout.drafts.budget import MAX_DEPTH, SHARES, DraftBudget
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.suffix_index import HISTORY, PHRASES, SIBLING, SuffixIndexes
from fusion.rollout.drafts.texts import MAX_PHRASE_BYTES, TextSpec
from tests.inference.engines import by_id, engine, generate, generate_brokenly, requests
from tests.rollout.drafts.plain_indexes import PlainIndexes

PARAMS = SamplingParams(max_tokens=400, stop_token_ids=())


class AllTokens(DraftBudget):
    """A budget that takes every drafted token."""

    def skips(self):
        return False

    def min_probability(self, num_sequences):
        return 0.0

    def choose(self, owners, probabilities, num_sequences, **options):
        return np.ones(len(owners), bool)

    def by_share(self):
        return SHARES


def drafter(max_children=1, max_depth=MAX_DEPTH, phrase_bytes=0, **options) -> TextDrafter:
    indexes = SuffixIndexes(phrase_bytes)
    made = TextDrafter(indexes, spec=TextSpec(**options), max_children=max_children, max_depth=max_depth)
    made.budget = AllTokens()
    return made


def sequence(
    request: str, prompt: list[int], text: list[int], group: str = "g", last_rewards: LastRewards = NO_REWARDS
) -> Sequence:
    made = Sequence.of(Request(request, tuple(prompt), PARAMS, group, last_rewards=last_rewards), PARAMS, ())
    made.tokens += text
    return made


def paths(made: TextDrafter, *sequences: Sequence, depth: int = 8) -> list[list[int] | None]:
    drafts = made.draft(sequences, [depth] * len(sequences), 1000)
    return [None if draft is None else list(draft.tokens) for draft in drafts]


@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("brokenly", [False, True])
def test_an_engine_samples_the_same_with_drafts(children, brokenly):
    wanted = requests(count=12, max_tokens=60, temperature=0.6)  # low enough for text that repeats
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    drafted = engine(batch_invariant=True, max_kv_tokens=2048)
    drafted.scheduler.drafter = made = drafter(max_children=children, phrase_bytes=1 << 20)
    found = generate_brokenly(drafted, wanted, seed=1) if brokenly else by_id(generate(drafted, wanted))
    assert found == plain
    assert 0 < drafted.scheduler.counters.accepted_tokens < drafted.scheduler.counters.drafted_tokens
    assert drafted.scheduler.counters.drafted_tokens == sum(made.totals.drafted)
    assert drafted.scheduler.counters.accepted_tokens == sum(made.totals.accepted)


@pytest.mark.parametrize("indexes", [SuffixIndexes, PlainIndexes])
def test_a_new_prompt_is_drafted_from_what_was_said_to_others(indexes):
    made = TextDrafter(indexes(1 << 20), budget=AllTokens())
    paths(made, sequence("a", [1], [2, 3, 4, 5, 6, 7]))
    other = sequence("b", [8], [3, 4])
    assert paths(made, other, depth=3) == [[5, 6, 7]]
    assert made._drafted[id(other)][1].tolist() == [PHRASES] * 3


def test_what_becomes_history_is_not_counted_as_phrases_again():
    made = drafter(phrase_bytes=1 << 20)
    one = sequence("e0/0", [1], [2, 3, 4, 5, 6], group="e0")
    paths(made, one)
    made.end(one)
    shares = []
    for number, prompt in enumerate(([8], [9])):
        other = sequence(f"e{number}/other", prompt, [2, 3, 4], group=f"other {number}")
        assert paths(made, other, depth=1) == [[5]]
        shares.append(made._drafted[id(other)][0].tolist())
        again = sequence(f"e{number + 1}/0", [1], [], group=f"e{number + 1}")
        paths(made, again)
        assert made.texts.prompts[made.texts.live["e1/0"].key].index is not None, "its history is indexed"
    assert shares[0] == shares[1]


def test_the_phrases_of_a_card_are_part_of_its_bytes_for_text():
    for mib, expected in ((1, 1 << 17), (8, 1 << 20), (1024, MAX_PHRASE_BYTES)):
        config = DraftsConfig(source="both", mib=mib)
        assert TextSpec.of(config).phrase_bytes == expected
        made = TextDrafter.of(config)
        paths(made, sequence("a", [1], np.random.default_rng(0).integers(0, 1000, 20_000).tolist()))
        assert 0 < made.texts.indexes.nbytes - made.texts.indexes.nbytes_of(0) <= expected


def test_the_budget_depends_on_no_clock():
    wanted = requests(count=12, max_tokens=60, temperature=0.6)
    plain = by_id(generate(engine(batch_invariant=True), wanted))
    totals = []
    for seconds in (1e-6, 1.0):
        drafted = engine(batch_invariant=True)
        clock = count(step=seconds).__next__
        drafted.scheduler.drafter = made = TextDrafter(SuffixIndexes(), budget=DraftBudget(), clock=clock)
        assert by_id(generate(drafted, wanted)) == plain
        totals.append((made.totals.drafted, made.totals.accepted))
    assert totals[0] == totals[1] and sum(totals[0][0]) > sum(totals[0][1]) > 0


def test_a_sequence_follows_its_siblings_and_itself():
    made = drafter()
    first, second = sequence("a", [1], [2, 3, 4, 5, 6, 7]), sequence("b", [1], [9, 9, 2, 3, 4])
    assert paths(made, first) == [None]
    assert paths(made, first, second) == [None, [5, 6, 7]]
    second.tokens += [5, 8, 8, 2, 3, 4, 5]
    assert paths(made, second) == [[6, 7]], "what followed most often, at first the longest match"


def test_history_is_what_the_last_group_of_the_prompt_said():
    for history in (True, False):
        made = drafter(history=history)
        old = sequence("a", [1], [2, 3, 4, 5, 6, 7, 8], group="e0-1")
        paths(made, old)
        old.tokens += [9]
        made.end(old)
        new = sequence("b", [1], [2, 3, 4, 5], group="e1-1")
        assert paths(made, new) == [[6, 7, 8, 9] if history else None]
        if history:
            assert made._drafted[id(new)][1].tolist() == [HISTORY] * 4
        made.end(new)
        newest = sequence("c", [1], [2, 3, 4, 5], group="e2-1")
        assert paths(made, newest) == [None], "the last group said no more than this; the one before is forgotten"


@pytest.mark.parametrize("resumes", [False, True])
def test_history_of_several_groups_ages(resumes):
    """Of three groups the last one counts four times, the one before twice; what is older is forgotten."""
    made = drafter(max_history=3)
    said = [[7] * 9, [8] * 9, [5] * 3, [5, 5, 6], [6, 11], [9]]  # behind 2, 3, 4, in the groups of six epochs
    for epoch, tokens in enumerate(said):
        if resumes:
            pieces, made = made.texts.history(10_000), drafter(max_history=3)
            made.texts.load_history(pieces)
        counts = Counter()
        for age, earlier in enumerate(reversed(said[max(0, epoch - 3) : epoch])):
            counts.update({token: (4 >> age) * count for token, count in Counter(earlier).items()})
        group = [sequence(f"{epoch}/{i}", [1], [2, 3, 4], group=f"e{epoch}") for i in range(len(tokens))]
        found = paths(made, *group, depth=1)
        if epoch:
            token, count = min(counts.items(), key=lambda one: (-one[1], one[0]))
            assert found == [[token]] * len(tokens)
            assert made._drafted[id(group[0])][0].tolist() == pytest.approx([count / (counts.total() + 1)])
        for seq, token in zip(group, tokens, strict=True):
            seq.tokens.append(token)
            made.end(seq)


@pytest.mark.parametrize("indexes", [SuffixIndexes, PlainIndexes])
@pytest.mark.parametrize("better", [0, 1])
def test_of_branches_that_occur_as_often_the_better_rewarded_one_is_drafted_first(indexes, better):
    made = TextDrafter(indexes(), max_children=2)
    made.budget = AllTokens()
    said = [[2, 3, 4, 5], [2, 3, 4, 9]]
    for number, text in enumerate(said):
        old = sequence(f"e0-1/{number}", [1], text, group="e0-1")
        paths(made, old)
        made.end(old)
    rewards = ("e0-1", (1.0, 0.0) if better == 0 else (0.0, 1.0))
    new = sequence("e1-1/0", [1], [2, 3, 4], group="e1-1", last_rewards=rewards)
    assert paths(made, new, depth=1) == [[5, 9] if better == 0 else [9, 5]]
    assert made._drafted[id(new)][0].tolist() == pytest.approx([4 / 7, 1 / 7])


@pytest.mark.parametrize("rewards", [NO_REWARDS, ("e0-1", (None, None)), ("e0-1", (1.0, 1.0)), ("e0-7", (0.0, 1.0))])
def test_where_rewards_tell_nothing_branches_count_alike(rewards):
    """There are none, they are equal, or are those of another group."""
    made = drafter(max_children=2)
    for number, text in enumerate(([2, 3, 4, 5], [2, 3, 4, 9])):
        old = sequence(f"e0-1/{number}", [1], text, group="e0-1")
        paths(made, old)
        made.end(old)
    new = sequence("e1-1/0", [1], [2, 3, 4], group="e1-1", last_rewards=rewards)
    assert paths(made, new, depth=1) == [[5, 9]] and made._drafted[id(new)][0].tolist() == pytest.approx([2 / 6, 2 / 6])


def test_older_groups_keep_their_rewards():
    made = drafter(max_history=2, max_children=4)
    last = NO_REWARDS
    for epoch, texts in enumerate(([[2, 3, 4, 5], [2, 3, 4, 6]], [[2, 3, 4, 7], [2, 3, 4, 8]])):
        for number, text in enumerate(texts):
            old = sequence(f"e{epoch}/{number}", [1], text, group=f"e{epoch}", last_rewards=last)
            paths(made, old)
            made.end(old)
        last = f"e{epoch}", (0.0, 1.0)
    new = sequence("e2/0", [1], [2, 3, 4], group="e2", last_rewards=last)
    assert paths(made, new, depth=1) == [[8, 6, 7, 5]], "weights 8, 4, 2 and 1"
    assert made._drafted[id(new)][0].tolist() == pytest.approx([8 / 17, 4 / 17, 2 / 17, 1 / 17])


def test_a_group_for_which_nothing_is_looked_up_is_not_indexed_and_is_history_nevertheless():
    made, skips = drafter(), [True]
    made.budget.skips = lambda: skips[0]
    old = sequence("a", [1], [2, 3, 4, 5, 6], group="e0")
    assert paths(made, old) == [None]
    made.end(old)
    assert made.texts.indexes.nbytes == 0 and made.texts.nbytes == 4 * (1 + 5)
    skips[0] = False
    assert paths(made, sequence("b", [1], [2, 3, 4], group="e1")) == [[5, 6]]


def test_groups_of_one_prompt_at_the_same_time_are_siblings():
    made = drafter()
    first, second = sequence("a", [1], [2, 3, 4, 5], group="e0-1"), sequence("b", [1], [2, 3, 4], group="e0-2")
    assert paths(made, first, second) == [None, [5]]
    made.end(first)
    assert paths(made, second) == [[5]]
    third = sequence("c", [1], [9, 2, 3, 4], group="e0-3")
    assert paths(made, second, third) == [[5], [5]], "the second still runs"
    for seq in (second, third):
        made.end(seq)
    fourth = sequence("d", [1], [9, 2, 3, 4], group="e1-1")
    assert paths(made, fourth) == [[5]] and made._drafted[id(fourth)][1].tolist() == [HISTORY]


def test_where_few_tokens_are_verified_those_of_probes_and_of_requests_that_came_back_come_first():
    made = drafter()
    made.budget = DraftBudget()
    said, rest = [2, 3, 4, 5, 6, 7], [[2, 3, 4], [2, 3, 4], [2, 3, 4]]
    paths(made, sequence("a", [1], said), depth=0)
    live = [sequence(name, [1], text) for name, text in zip("bcd", rest, strict=True)]
    for seq, priority in zip(live, (1, 0, 1), strict=True):
        seq.request = replace(seq.request, priority=priority)
    drafts = made.draft(live, [8] * 3, max_tokens=2)
    assert [draft and list(draft.tokens) for draft in drafts] == [None, [5, 6], None]


def test_a_step_without_drafts_reads_nothing_and_the_next_one_reads_all():
    made, skips = drafter(), [False]
    made.budget.skips = lambda: skips[0]
    first, second = sequence("a", [1], [2, 3, 4]), sequence("b", [1], [9, 2, 3, 4])
    assert paths(made, first, second) == [None, None]
    skips[0], size = True, made.texts.nbytes
    for token in (5, 6, 7):
        first.tokens.append(token)
        assert paths(made, first, second) == [None, None] and made.texts.nbytes == size
    skips[0] = False
    assert paths(made, first, second) == [None, [5, 6, 7]]
    skips[0] = True
    second.tokens += [5, 8]
    made.end(second)
    skips[0] = False
    assert paths(made, sequence("c", [1], [3, 4, 5, 8], group="h")) == [None]
    made.end(first)
    assert paths(made, sequence("d", [1], [2, 3, 4, 5], group="i")) == [[6, 7]]


def test_siblings_can_be_left_out():
    made = drafter(siblings=False)
    first, second = sequence("a", [1], [2, 3, 4, 5, 6, 7]), sequence("b", [1], [2, 3, 4])
    assert paths(made, first, second) == [None, None]


def test_prompts_without_running_requests_are_dropped_first_when_memory_is_short():
    made = drafter(max_bytes=300_000)
    running = sequence("r", [1, 99], list(range(100)), group="g")
    for i in range(40):
        one = sequence(f"r{i}", [1, i], list(range(1000)), group=f"g{i}")
        paths(made, running, one)
        made.end(one)
    assert made.texts.nbytes <= 300_000 + 120_000 and made.totals.dropped > 20
    running.tokens += [5, 6, 7]
    assert paths(made, running)[0][:2] == [8, 9], "what runs is kept"


def test_a_prompt_with_more_text_than_it_may_have_is_dropped_alone_and_counted():
    made = drafter(max_group_bytes=200_000)
    small, large = sequence("s", [1], [2, 3, 4, 5, 6, 2, 3, 4]), sequence("l", [9], [], group="l")
    for start in range(0, 6000, 100):
        large.tokens += range(start, start + 100)
        assert paths(made, small, large)[0][:5] == [5, 6, 2, 3, 4], "others are kept"
        own = sum(made.texts.indexes.nbytes_of(one.index) + 4 * one.num_tokens for one in made.texts.prompts.values())
        assert own == made.texts.nbytes < 200_000 + 60_000
    assert made.totals.dropped == 1 and made.texts.live["l"] is None and len(made.texts.prompts) == 1
    for seq in (small, large):
        made.end(seq)
    again = sequence("m", [9], [2, 3, 4], group="m")
    assert paths(made, again) == [None] and made.texts.live["m"] is not None, "its next group begins anew"


def test_text_that_is_not_used_for_too_long_is_dropped_and_counted():
    made = drafter(max_age=2)
    for i in range(3):
        made.adopt(i)
        one = sequence(f"r{i}", [i], [2, 3, 4, 5], group=f"e0-{i}")
        paths(made, one)
        if i:
            made.end(one)
    assert made.totals.expired == 0
    made.adopt(3)
    assert made.totals.expired == 0, "the first one runs, the second was used 2 versions ago"
    made.adopt(4)
    assert (made.totals.expired, made.totals.dropped) == (1, 0)
    for i, expected in ((0, [5]), (1, None), (2, [5])):
        assert paths(made, sequence(f"new{i}", [i], [2, 3, 4], group=f"e1-{i}")) == [expected]


def test_more_running_text_than_there_is_room_for_is_not_read_again_in_every_step():
    made = drafter(max_bytes=300_000)
    live = [sequence(f"r{i}", [1, i], list(range(1000)), group=f"g{i}") for i in range(10)]
    found = []
    for token in (7, 8, 9, 10):
        for seq in live:
            seq.tokens.append(token)
        found.append([path is not None for path in paths(made, *live)])
    assert made.texts.nbytes <= 300_000
    assert found[2] == found[3] and 0 < sum(found[3]) < 10
    for seq in live:
        made.end(seq)


def test_the_only_prompt_is_bounded_too():
    made = drafter(max_bytes=50_000)
    seq = sequence("a", [1], list(range(2000)))
    paths(made, seq)
    seq.tokens += [1, 2, 3]
    assert paths(made, seq) == [None] and made.texts.nbytes == 0


def test_a_request_that_comes_again_is_another_one():
    """As in every evaluation."""
    made = drafter()
    for text, expected in (([2, 3, 4, 5, 6], None), ([2, 3, 4, 9, 9, 9], [5, 6]), ([2, 3, 4, 8], [9] * 8)):
        seq = sequence("eval-0", [1], text[:3], group="eval-0")
        assert paths(made, seq) == [expected], "what was said last time is history"
        seq.tokens += text[3:]
        made.end(seq)
    chunk = sequence("eval-0", [1], [2, 3, 4, 8, 7], group="eval-0")
    paths(made, chunk)
    assert len(made.texts.live["eval-0"].numbers) == 1, "one that goes on is the same"


def test_a_request_that_never_ran_changes_no_history():
    made = drafter()
    old = sequence("a", [1], [2, 3, 4, 5, 6], group="e0")
    paths(made, old)
    made.end(old)
    made.end(sequence("b", [1], [], group="e1"))
    assert paths(made, sequence("c", [1], [2, 3, 4], group="e2")) == [[5, 6]]


def test_drafts_depend_only_on_the_calls():
    """As ranks of one engine make the same calls, they draft alike."""
    runs = []
    for _ in range(2):
        drafted = engine()
        drafted.scheduler.drafter = made = TextDrafter(PlainIndexes())
        seen = []
        original = made.draft

        def draft(*args, original=original, seen=seen):
            seen.append(original(*args))
            return seen[-1]

        made.draft = draft
        generate(drafted, requests(count=6, max_tokens=40, temperature=0.5))
        runs.append(seen)
    assert runs[0] == runs[1] and any(any(drafts) for drafts in runs[0])


def test_a_group_has_its_sources_counted():
    made = drafter()
    drafted = engine()
    drafted.scheduler.drafter = made
    wanted = requests(count=6, max_tokens=50, temperature=0.0)
    generate(drafted, wanted)
    before = list(made.totals.accepted)
    assert before[HISTORY] == 0
    generate(drafted, [replace(one, id=f"again-{one.id}", group=f"again-{one.group}") for one in wanted])
    assert made.totals.accepted[HISTORY] > 0 and made.totals.accepted[SIBLING] >= before[SIBLING]
