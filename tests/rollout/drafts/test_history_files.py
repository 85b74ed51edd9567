"""History of prompts over a resume: the same drafts afterwards, bounded, and nothing of a damaged file."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference.request import NO_REWARDS
from fusion.rollout.drafts.history_files import read_history, write_history
from fusion.rollout.drafts.pieces import TextPiece, compress, decompress, encode
from fusion.rollout.drafts.suffix_index import HISTORY
from tests.rollout.drafts.test_drafter import drafter, paths, sequence


def said(made, prompt, *texts, group="e0"):
    """Lets a group say these texts to the prompt."""
    sequences = [sequence(f"{group}/{i}", prompt, text, group=group) for i, text in enumerate(texts)]
    paths(made, *sequences)
    for one in sequences:
        made.end(one)


def resumed(folder, *drafters, **options):
    for rank, made in enumerate(drafters):
        write_history(folder, rank, made.texts.history(1000))
    after = drafter(**options)
    after.texts.load_history(read_history(folder))
    return after


def test_the_next_epoch_of_a_resumed_run_has_the_history(tmp_path):
    before = drafter()
    said(before, [1], [2, 3, 4, 5, 6, 7], [9, 9, 9])
    said(before, [8], [2, 3, 4, 1, 1])
    after = resumed(tmp_path, before)
    for prompt, expected in (([1], [5, 6, 7]), ([8], [1] * 8), ([7], None)):
        new = sequence(f"e1/{prompt}", prompt, [2, 3, 4], group=f"e1/{prompt}")
        for made in (before, after):
            assert paths(made, new) == [expected]
        if expected:
            assert after._drafted[id(new)][1].tolist() == [HISTORY] * len(expected)


def test_phrases_of_what_was_said_before_a_resume_are_counted_once_it_is_looked_up(tmp_path):
    before = drafter(phrase_bytes=1 << 20)
    said(before, [1], [2, 3, 4, 5, 6, 7])
    after = resumed(tmp_path, before, phrase_bytes=1 << 20)
    for made, known in ((before, True), (after, False)):
        assert paths(made, sequence("e1/a", [8], [2, 3, 4], group="e1/a")) == [[5, 6, 7] if known else None]
        assert paths(made, sequence("e1/b", [1], [2], group="e1/b")) == [[3, 4, 5, 6, 7]]
        assert paths(made, sequence("e1/c", [9], [2, 3, 4], group="e1/c")) == [[5, 6, 7]]


@pytest.mark.parametrize("arrive", ["before", "after"])
def test_rewards_weigh_over_a_resume(tmp_path, arrive):
    """Those that were known when the checkpoint was taken, and those of the last group, which arrive with the next."""
    before, rewards = drafter(max_history=2), ("e0", (0.0, 1.0))
    said(before, [1], [2, 3, 4, 5], [2, 3, 4, 9])
    if arrive == "before":
        one = sequence("e1/0", [1], [7, 7], group="e1", last_rewards=rewards)
        paths(before, one)
        before.end(one)
    after = resumed(tmp_path, before, max_history=2, max_children=2)
    last = NO_REWARDS if arrive == "before" else rewards
    new = sequence("e2/0", [1], [2, 3, 4], group="e2", last_rewards=last)
    assert paths(after, new, depth=1) == [[9, 5]]
    shares = [4 / 7, 1 / 7] if arrive == "before" else [8 / 12, 2 / 12]
    assert after._drafted[id(new)][0].tolist() == pytest.approx(shares), "with 2 for shorter text"


def test_files_of_the_first_version_are_read_and_weigh_alike(tmp_path):
    pieces = [TextPiece(b"p" * 16, "0", str(n), 0, array("i", [2, 3, 4, n])) for n in range(2)]
    message = encode({}, pieces)
    assert b"rewards" not in message and b"version" not in message
    (tmp_path / "rank-00000.bin").write_bytes(compress(message))
    assert read_history(tmp_path) == pieces and {piece.reward for piece in pieces} == {None}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace(b'"version":2', b'"version":3'), "version 3 of the history"),
        (lambda text: text.replace(b'"rewards":[0.5,null]', b'"rewards":[0.5]     '), "expected a list of 2"),
        (lambda text: text.replace(b'"rewards":[0.5,null]', b'"rewards":{"0":1}   '), "expected a list of 2"),
        (lambda text: text.replace(b"[0.5,null]", b"[NaN,null]"), "a reward is nan: expected a finite float"),
        (lambda text: text.replace(b"[0.5,null]", b'["1",null]'), "a reward is '1'"),
        (lambda text: text.replace(b'"r-0"', b"[1,2]"), "is not text"),
    ],
)
def test_a_file_with_malformed_rewards_is_refused(tmp_path, change, expected):
    tokens = array("i", [2, 3])
    pieces = [TextPiece(b"p" * 16, "0", "r-0", 0, tokens, 0.5), TextPiece(b"p" * 16, "0", "r-1", 0, tokens)]
    write_history(tmp_path, 0, pieces)
    assert read_history(tmp_path) == pieces
    path = tmp_path / "rank-00000.bin"
    changed = change(message := decompress(path.read_bytes()))
    assert len(changed) == len(message) and changed != message
    path.write_bytes(compress(changed))
    with pytest.raises(ValueError, match=expected):
        read_history(tmp_path)


def test_history_that_was_not_used_since_is_kept_over_the_next_resume(tmp_path):
    before = drafter()
    said(before, [1], [2, 3, 4, 5])
    middle = resumed(tmp_path / "1", before)
    said(middle, [8], [2, 3, 4, 1])
    after = resumed(tmp_path / "2", middle)
    for prompt, expected in (([1], [5]), ([8], [1])):
        assert paths(after, sequence(f"e1/{prompt}", prompt, [2, 3, 4], group=f"e1/{prompt}")) == [expected]


def test_of_several_engines_the_most_text_of_a_prompt_is_loaded(tmp_path):
    one, two = drafter(), drafter()
    said(one, [1], [2, 3, 4, 5])
    said(two, [1], [2, 3, 4, 5, 6])
    said(two, [8], [2, 3, 4, 1])
    after = resumed(tmp_path, one, two)
    assert sorted(len(piece.tokens) for piece in after.texts.history(1000)) == [4, 5]
    assert paths(after, sequence("e1/0", [1], [2, 3, 4], group="e1")) == [[5, 6]]


def test_what_was_used_last_is_saved_and_kept_where_there_is_no_room(tmp_path):
    before = drafter()
    for prompt in range(10):
        said(before, [prompt], list(range(100)))
    said(before, [3], list(range(100)), group="again")
    assert len(before.texts.history(250)) == 2
    keys = [piece.prompt for piece in before.texts.history(10_000)]
    after = drafter(max_bytes=1500)
    after.texts.load_history(before.texts.history(10_000))
    paths(after, sequence("new", [99], [1, 2, 3]))
    assert [piece.prompt for piece in after.texts.history(10_000)][-3:] == keys[:3]
    assert after.texts.nbytes <= 1500 + 4000
    assert len({piece.prompt for piece in before.texts.history(350)} & {*keys[:3]}) == 3


def test_without_drafts_from_history_nothing_is_saved_or_loaded(tmp_path):
    before = drafter()
    said(before, [1], [2, 3, 4, 5])
    after = resumed(tmp_path, before, history=False)
    assert paths(after, sequence("e1/0", [1], [2, 3, 4], group="e1")) == [None]
    assert after.texts.history(1000) == [] and after.texts.nbytes < 4000


def test_a_checkpoint_without_history_has_none(tmp_path):
    assert read_history(tmp_path / "drafts") == []


@given(st.data())
def test_a_damaged_file_is_refused_by_name(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("drafts")
    write_history(folder, 0, [TextPiece(b"p" * 16, "", "0", 0, array("i", range(50)))])
    path = folder / "rank-00000.bin"
    whole = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    for damaged in (bytes(flipped), whole[: bit // 8]):
        path.write_bytes(damaged)
        try:
            pieces = read_history(folder)
        except ValueError as error:
            assert str(path) in str(error)
        else:  # bits of the header that zlib ignores
            assert [list(piece.tokens) for piece in pieces] == [list(range(50))]


def test_the_age_of_loaded_history_counts_from_the_resume(tmp_path):
    before = drafter()
    said(before, [1], [2, 3, 4, 5])
    for version, expected in ((102, [5]), (103, None)):
        after = resumed(tmp_path / str(version), before, max_age=2)
        for adopted in range(100, version + 1):
            after.adopt(adopted)
        assert paths(after, sequence("e1/0", [1], [2, 3, 4], group="e1")) == [expected]
        assert after.totals.expired == (expected is None)
