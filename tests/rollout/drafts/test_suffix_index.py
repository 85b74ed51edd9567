"""Drafts of the C++ index equal those of the Python one, and those of a search through the text."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout.drafts.suffix_index import HISTORY, PHRASES, SIBLING, SuffixIndexes, check_buildable
from tests.rollout.drafts.plain_indexes import (
    DOUBT,
    FOLLOWERS,
    MAX_FOLLOWERS,
    MAX_TOTAL,
    MIN_WEIGHT,
    PHRASE_DOUBT,
    PlainIndexes,
)

MIN_MATCH = 2
MAX_MATCH = 4
ACCEPTANCE = np.array([0.1, 0.2, 0.3, 0.35, 0.5, 0.6, 0.85, 0.9])
WEIGHTS = 1, 3, 0, 2
"""Of sequences 0 to 3, whose sources are SIBLING, HISTORY, SIBLING, HISTORY"""

tokens = st.lists(st.integers(0, 2), max_size=12)
pieces = st.lists(st.tuples(st.integers(0, 3), tokens), max_size=8)
"""What arrives: (sequence, tokens); sequence i has source i % 2"""


def fill(indexes: SuffixIndexes, prompt: list[int], arrived: list[tuple[int, list[int]]]) -> tuple[int, list[int]]:
    index = indexes.new(prompt, MIN_MATCH, MAX_MATCH)
    numbers = [indexes.open(index, i % 2, WEIGHTS[i], is_new=i != 1) for i in range(4)]
    indexes.extend([(index, numbers[i]) for i, _ in arrived], [text for _, text in arrived])
    return index, numbers


def texts_of(prompt: list[int], arrived: list[tuple[int, list[int]]]) -> list[list[int]]:
    texts: list[list[int]] = [[], [], [], []]
    for i, piece in arrived:
        texts[i] += piece
    return [prompt + text for text in texts]


def followers(prompt: list[int], texts: list[list[int]], context: list[int]) -> tuple[set, dict[int, int]]:
    """Find where the context ends anywhere in the text, and count what follows it, weighted. The prompt, with which all
    begin, counts once."""
    ends: set[tuple[int, int]] = set()
    counts: dict[int, int] = {}
    size = len(context)
    for i, text in enumerate([prompt, *texts]):
        for end in range(size, len(text) + 1):
            if text[end - size : end] != context or (i > 0 and end < len(prompt)):
                continue
            ends.add((i if end > len(prompt) else 0, end))
            if end < len(text) and (i == 0 or end >= len(prompt)):
                counts[text[end]] = counts.get(text[end], 0) + (1 if i == 0 else WEIGHTS[i - 1])
    return ends, {token: count for token, count in counts.items() if count}


def shares_of(prompt: list[int], texts: list[list[int]], context: list[int]) -> dict[int, float]:
    """The shares of the tokens behind a context: of its longest suffix, and what that leaves of the next shorter one
    that occurs in more places."""
    shares: dict[int, float] = {}
    weight, last = 1.0, set()
    for size in range(min(len(context), MAX_MATCH), MIN_MATCH - 1, -1):
        ends, counts = followers(prompt, texts, context[-size:])
        if ends == last or weight <= MIN_WEIGHT:
            continue
        total, last = sum(counts.values()), ends
        for token, count in counts.items():
            shares[token] = shares.get(token, 0.0) + count * (weight / (total + DOUBT))
        weight *= DOUBT / (total + DOUBT)
    return shares


def searched(prompt: list[int], texts: list[list[int]], text: list[int], depth: int) -> list[tuple[int, float]]:
    """The most probable path behind a text."""
    path, probability, context = [], 1.0, list(text)
    while len(path) < depth and (shares := shares_of(prompt, texts, context)):
        token = min(shares, key=lambda token: (-shares[token], token))
        probability *= ACCEPTANCE[min(int(shares[token] * len(ACCEPTANCE)), len(ACCEPTANCE) - 1)]
        path.append((token, probability))
        context.append(token)
    return path


@given(prompt=tokens, arrived=pieces)
def test_a_path_is_what_most_often_followed_the_suffixes_that_are_compared(prompt, arrived):
    indexes, texts = PlainIndexes(), texts_of(prompt, arrived)
    index, numbers = fill(indexes, prompt, arrived)
    drafts = indexes.draft([(index, number) for number in numbers], [4] * 4, [4] * 4, ACCEPTANCE)
    for i, text in enumerate(texts):
        rows = drafts.of(i)
        found = list(zip(drafts.tokens[rows].tolist(), drafts.probabilities[rows].tolist(), strict=True))
        expected = searched(prompt, texts, text, 4)
        assert [token for token, _ in found] == [token for token, _ in expected]
        np.testing.assert_allclose([p for _, p in found], [p for _, p in expected], rtol=1e-12)
        assert drafts.parents[rows].tolist() == list(range(-1, len(found) - 1))


@given(
    prompts=st.lists(st.tuples(tokens, pieces), min_size=1, max_size=3),
    phrase_bytes=st.sampled_from([0, 1 << 20]),
    depth=st.integers(1, 5),
    nodes=st.integers(1, 9),
    children=st.integers(1, 3),
    least=st.floats(0, 0.5),
)
def test_both_implementations_draft_the_same_trees(prompts, phrase_bytes, depth, nodes, children, least):
    drafts = []
    for indexes in (SuffixIndexes(phrase_bytes), PlainIndexes(phrase_bytes)):
        places = [(index, n) for index, numbers in (fill(indexes, *one) for one in prompts) for n in numbers]
        sizes = [depth] * len(places), [nodes] * len(places)
        drafts.append(indexes.draft(places, *sizes, ACCEPTANCE, children, least))
    assert all(drafts[0].probabilities >= least)
    for name in ("offsets", "tokens", "parents", "shares", "probabilities", "sources"):
        ours, plain = (getattr(one, name) for one in drafts)
        assert ours.tolist() == plain.tolist() and ours.dtype == plain.dtype, name


@given(prompt=tokens, arrived=pieces, nodes=st.integers(1, 9))
def test_the_beginning_of_a_tree_is_the_tree_of_that_size(prompt, arrived, nodes):
    indexes = SuffixIndexes()
    index, numbers = fill(indexes, prompt, arrived)
    places = [(index, number) for number in numbers]
    large, small = (indexes.draft(places, [5] * 4, [size] * 4, ACCEPTANCE, 3) for size in (12, nodes))
    for i in range(4):
        assert large.tokens[large.of(i)][:nodes].tolist() == small.tokens[small.of(i)].tolist()
        parents, probabilities = large.parents[large.of(i)], large.probabilities[large.of(i)]
        assert all(parent < node for node, parent in enumerate(parents)), "a parent comes first"
        assert (np.diff(probabilities) <= 0).all() and np.unique([parents, large.tokens[large.of(i)]], axis=1).shape[
            1
        ] == len(parents)


def of_many_followers(num_tokens: int) -> list[int]:
    """A text in which few tokens are frequent, and are followed by ever more others."""
    ranks = np.random.default_rng(0).zipf(1.2, num_tokens)
    return np.minimum(ranks, 30_000).tolist()


def test_of_many_followers_those_count_that_came_first_and_the_others_keep_their_share():
    text, drafts = of_many_followers(8000), []
    for indexes in (SuffixIndexes(), PlainIndexes()):
        index = indexes.new([], min_match=1, max_match=3)
        number, other = (indexes.open(index, SIBLING) for _ in range(2))
        indexes.extend([(index, number), (index, other)], [text, [1]])
        drafts.append(indexes.draft([(index, other)], [3], [500], ACCEPTANCE, 500))
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    np.testing.assert_allclose(drafts[0].shares, drafts[1].shares, rtol=1e-12)
    behind = [b for a, b in pairwise(text) if a == 1]
    first = list(dict.fromkeys(behind))
    assert len(first) > 2 * MAX_FOLLOWERS, "as many as the test is about"
    direct = drafts[0].parents == -1
    shares = dict(zip(drafts[0].tokens[direct].tolist(), drafts[0].shares[direct].tolist(), strict=True))
    assert shares.keys() == {*first[:MAX_FOLLOWERS]}
    assert shares[first[0]] == pytest.approx(behind.count(first[0]) / (len(behind) + 1 + DOUBT), rel=0.01)


def test_a_draft_costs_as_much_behind_128k_tokens_as_behind_8k():
    def seconds(num_tokens: int) -> float:
        indexes, text = SuffixIndexes(), of_many_followers(num_tokens + 300)
        index = indexes.new([], min_match=1, max_match=7)
        places = [(index, indexes.open(index, SIBLING))]
        indexes.extend(places, [text[:num_tokens]])
        took_s = []
        for start in range(num_tokens, num_tokens + 300, 100):
            began_s = time.process_time()
            for token in text[start : start + 100]:
                indexes.extend(places, [[token]])
                indexes.draft(places, [8], [16], ACCEPTANCE, 4)
            took_s.append(time.process_time() - began_s)
        return min(took_s)  # other work on the machine only adds

    assert seconds(1 << 17) < 4 * seconds(1 << 13)


def test_a_draft_names_where_its_tokens_occurred():
    for indexes in (SuffixIndexes(), PlainIndexes()):
        index = indexes.new([9, 9, 9], min_match=2, max_match=7)
        history, sibling, one = (indexes.open(index, source) for source in (HISTORY, SIBLING, SIBLING))
        indexes.extend([(index, history), (index, sibling)], [[1, 2, 3, 4, 5], [6, 7, 8]])
        indexes.extend([(index, one)], [[6]])
        drafts = indexes.draft([(index, one)], [8], [8], ACCEPTANCE)
        assert drafts.tokens.tolist() == [7, 8] and drafts.sources.tolist() == [SIBLING] * 2
        indexes.extend([(index, one)], [[1, 2, 3]])
        drafts = indexes.draft([(index, one)], [8], [8], ACCEPTANCE)
        assert drafts.tokens.tolist() == [4, 5] and drafts.sources.tolist() == [HISTORY] * 2


@pytest.mark.parametrize("indexes", [SuffixIndexes, PlainIndexes])
def test_what_is_said_to_other_prompts_is_drafted_until_the_prompt_has_its_own(indexes):
    made = indexes(1 << 20)
    first, other = (made.new([prompt], min_match=1, max_match=7) for prompt in (8, 9))
    made.extend([(first, made.open(first, SIBLING))], [[1, 2, 3, 4, 1, 2, 3, 4]])
    place = other, made.open(other, SIBLING)
    made.extend([place], [[1, 2]])
    drafts = made.draft([place], [2], [2], ACCEPTANCE)
    assert drafts.tokens.tolist() == [3, 4] and drafts.sources.tolist() == [PHRASES] * 2
    sibling = other, made.open(other, SIBLING, 4)
    made.extend([sibling], [[1, 2, 5, 6, 1, 2, 5, 6]])
    drafts = made.draft([place], [2], [2], ACCEPTANCE)
    assert drafts.tokens.tolist() == [5, 6] and drafts.sources.tolist() == [SIBLING] * 2
    assert 3 in made.draft([place], [1], [9], ACCEPTANCE, 3).tokens, "as another branch"


def test_text_that_was_counted_before_is_not_counted_again():
    for is_new in (True, False):
        made = SuffixIndexes(1 << 20)
        first, other = (made.new([prompt], min_match=1, max_match=7) for prompt in (8, 9))
        made.extend([(first, made.open(first, HISTORY, is_new=is_new))], [[1, 2, 3]])
        place = other, made.open(other, SIBLING)
        made.extend([place], [[1, 2]])
        assert made.draft([place], [1], [1], ACCEPTANCE).tokens.tolist() == [3] * is_new


def test_frequent_phrases_stay_and_new_ones_find_room_in_a_table_that_is_full():
    limit, draw = 1 << 18, np.random.default_rng(0)
    made = SuffixIndexes(limit)
    index = made.new([], min_match=1, max_match=7)
    frequent = [[1000 + 10 * i + k for k in range(6)] for i in range(20)]
    sizes, before = [0], frequent

    def known(phrases):
        """Return how many of the phrases are drafted whole from their first half."""
        other = made.new([], min_match=1, max_match=7)
        places = [(other, made.open(other, SIBLING, is_new=False)) for _ in phrases]
        made.extend(places, [text[:3] for text in phrases])
        drafts = made.draft(places, [3] * len(places), [3] * len(places), np.ones(1))
        made.remove(other)
        return sum(drafts.tokens[drafts.of(i)].tolist() == text[3:] for i, text in enumerate(phrases))

    for number in range(120):
        if number == 40:
            before, frequent = frequent, [[token + 2000 for token in text] for text in frequent]
        noise = [draw.integers(0, 1000, 100).tolist() for _ in range(20)]
        texts = [*frequent, *noise]
        made.extend([(index, made.open(index, SIBLING)) for _ in texts], texts)
        sizes.append(made.nbytes - made.nbytes_of(index))
        if number == 39:
            assert known(frequent) >= 18
    assert known(frequent) >= 18 and known(before) <= 2, "what is not said any more makes room"
    assert sizes == sorted(sizes) and limit / 2 < sizes[-1] <= limit, "as full as the test is about"


def test_of_many_followers_of_a_phrase_both_implementations_keep_the_same_and_halve_their_counts_alike():
    draw, drafts = np.random.default_rng(0), []
    text = [token for each in np.minimum(draw.zipf(1.5, 2000), 9).tolist() for token in (0, each)]
    for indexes in (SuffixIndexes(1 << 20), PlainIndexes(1 << 20)):
        first, other = (indexes.new([prompt], min_match=1, max_match=7) for prompt in (20, 21))
        place = other, indexes.open(other, SIBLING, is_new=False)
        indexes.extend([(first, indexes.open(first, SIBLING)), place], [text, [0]])
        drafts.append(indexes.draft([place], [3], [60], ACCEPTANCE, 9))
    assert len({*text}) > FOLLOWERS and len(text) // 2 > MAX_TOTAL, "as much as the test is about"
    assert np.count_nonzero(drafts[0].parents == -1) == FOLLOWERS
    for name in ("offsets", "tokens", "parents", "shares", "sources"):
        ours, plain = (getattr(one, name) for one in drafts)
        assert ours.tolist() == plain.tolist(), name


@given(texts=st.lists(st.lists(st.integers(0, 9), max_size=400), min_size=1, max_size=3))
def test_shares_of_phrases_are_those_of_what_followed(texts):
    """Of at most 4 different tokens, which are all that is kept, and counts that are not halved yet, exactly."""
    texts = [[token % 4 for token in text] for text in texts]
    made = SuffixIndexes(1 << 24)
    index = made.new([], min_match=1, max_match=7)
    made.extend([(index, made.open(index, SIBLING)) for _ in texts], texts)
    other = made.new([5], min_match=1, max_match=7)
    place = other, made.open(other, SIBLING, is_new=False)
    made.extend([place], [[0]])
    drafts = made.draft([place], [1], [9], ACCEPTANCE, 9)
    behind = [b for text in texts for a, b in pairwise(text) if a == 0]
    shares = {token: behind.count(token) / (len(behind) + PHRASE_DOUBT) for token in set(behind)}
    assert dict(zip(drafts.tokens.tolist(), drafts.shares.tolist(), strict=True)) == pytest.approx(shares)


def test_repeated_text_costs_no_more_than_other_text():
    indexes = SuffixIndexes()
    index = indexes.new([], min_match=3, max_match=7)
    one = indexes.open(index, SIBLING)
    indexes.extend([(index, one)], [[7] * 200_000])  # quadratic cost would take minutes
    assert indexes.draft([(index, one)], [8], [8], ACCEPTANCE).tokens.tolist() == [7] * 8
    assert indexes.nbytes / 200_000 < 120
    indexes.remove(index)
    assert not indexes.nbytes, "all bytes are counted"


def test_without_a_compiler_drafts_are_refused_by_key(tmp_path, monkeypatch):
    check_buildable("both")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="rollout.drafts.source=both: no C.. compiler found"):
        check_buildable("both")
