"""A log is rewound to the rows of its seal: what was damaged since is named and dropped, what came later is cut."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion.telemetry.row_digests import Block, RowDigests, Seal, rewind
from tests.telemetry.test_full_disk import full


def rows_of(count, first=1):
    return [
        json.dumps({"step": number, "text": "é" * (number % 7)}).encode() + b"\n"
        for number in range(first, first + count)
    ]


def sealed(path, rows, per_block):
    """Write rows and seal them in two goes."""
    digests = RowDigests(per_block)
    path.write_bytes(b"".join(rows[: len(rows) // 2]))
    digests.seal(path, path.stat().st_size)
    path.write_bytes(b"".join(rows))
    return digests.seal(path, path.stat().st_size)


@settings(max_examples=200)
@example(count=7, per_block=3, later=2, torn=True, flip=0.5, cut=None)
@given(
    count=st.integers(0, 9),
    per_block=st.integers(1, 4),
    later=st.integers(0, 3),
    torn=st.booleans(),
    flip=st.none() | st.floats(0, 1, exclude_max=True),
    cut=st.none() | st.floats(0, 1, exclude_max=True),
)
def test_rows_of_whole_blocks_are_kept_and_no_others(count, per_block, later, torn, flip, cut):
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "groups.jsonl", rows_of(count)
        seal = sealed(path, rows, per_block)
        assert seal == Seal.from_json(json.loads(json.dumps(seal.to_json())))
        whole = b"".join(rows)
        data = bytearray(whole + b"".join(rows_of(later, first=count + 1)) + b'{"step": 99, "te' * torn)
        if flip is not None and data:
            data[int(flip * len(data))] ^= 4
        if cut is not None:
            del data[int(cut * len(data)) :]
        path.write_bytes(data)
        num_cut, line = rewind(path, count, seal)
        blocks = [b"".join(rows[start : start + per_block]) for start in range(0, count, per_block)]
        starts = [sum(map(len, blocks[:number])) for number in range(len(blocks))]
        kept = [data[start : start + len(block)] == block for start, block in zip(starts, blocks, strict=True)]
        assert path.read_bytes() == b"".join(block for block, keeps in zip(blocks, kept, strict=True) if keeps)
        assert (line is None) == all(kept), line
        if line is None:
            assert num_cut == data[len(whole) :].count(b"\n") and [path.name] == [
                one.name for one in path.parent.iterdir()
            ]
        else:
            assert path.with_name("groups.jsonl.damaged").read_bytes() == data
            first = 1 + per_block * kept.index(False)
            assert line.startswith(f"groups.jsonl: damaged rows were dropped ({first}")
        left = path.read_bytes()
        rewind(path, count, seal)
        assert path.read_bytes() == left, "a start that ended before its first checkpoint dropped them"
        again = rewind(path, count, sealed(path, path.read_bytes().splitlines(keepends=True), per_block))
        assert again == (0, None)


def test_a_seal_reads_only_what_was_written_since_the_last_one(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", rows_of(5)
    digests = RowDigests(2)
    path.write_bytes(b"".join(rows[:3]))
    digests.seal(path, path.stat().st_size)
    path.write_bytes(b"x" * len(b"".join(rows[:3])) + b"".join(rows[3:]))
    assert digests.seal(path, path.stat().st_size) == sealed(path, rows, 2)


def test_a_seal_ends_where_the_cut_was_and_at_a_whole_row(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", rows_of(4)
    path.write_bytes(b"".join(rows) + b'{"step"')
    end = len(b"".join(rows[:2]))
    assert [block.rows for block in RowDigests(1).seal(path, end).blocks] == [1, 2]
    assert [block.rows for block in RowDigests(3).seal(path, end + 1).blocks] == [3]
    assert RowDigests(3).seal(path, path.stat().st_size).blocks[-1].end == len(b"".join(rows))
    assert RowDigests(3).seal(tmp_path / "missing", 0) == Seal()


def test_a_row_that_was_about_to_be_completed_is_no_damage_in_either_form(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", rows_of(3)
    old = sealed(path, rows, 1)
    longer = [*rows[:2], b'{"step": 3, "completed": true}\n']
    seal = replace(sealed(path, longer, 1), before=old.blocks[-1])
    for written in (rows, longer):
        path.write_bytes(b"".join(written) + b'{"step": 4}\n')
        assert rewind(path, 3, seal) == (1, None) and path.read_bytes() == b"".join(written)
    path.write_bytes(b"".join(longer).replace(b"true", b"tru3"))
    assert rewind(path, 3, seal) == (
        0,
        f"metrics.jsonl: damaged rows were dropped (3); the damaged file is kept as {path}.damaged",
    )


def test_without_a_seal_rows_are_cut_by_their_step_and_bad_ones_do_not_block_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = rows_of(3)
    path.write_bytes(b"".join([good[0], b"[]\n", b"\xff\n", good[1], b'{"step": "2"}\n', good[2], b'{"step": 4']))
    num_cut, line = rewind(path, 2, None)
    assert num_cut == 1 and "damaged rows were dropped (2-3, 5)" in line
    assert path.read_bytes() == good[0] + good[1]


def test_a_damaged_log_that_cannot_be_kept_stays_as_it_is_and_is_named(tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_bytes(b"[]\n" + b"".join(rows_of(9)))
    before = path.read_bytes()
    with full(), pytest.raises(OSError, match=r"bytes to write, .*free\): '.*/groups.jsonl.damaged'"):
        rewind(path, 9, None)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_a_missing_log_is_named(tmp_path):
    seal = Seal((Block(10, 2, "0" * 32),))
    assert rewind(tmp_path / "groups.jsonl", 1, seal) == (0, "groups.jsonl is missing: it had 2 rows")
    assert rewind(tmp_path / "groups.jsonl", 1, Seal()) == rewind(tmp_path / "groups.jsonl", 1, None) == (0, None)


@pytest.mark.parametrize("listed", [[], [["1 1"], []], [["2 1 a", "1 2 b"], []], [["-1 1 a"], []], [[3], []], "ab", {}])
def test_blocks_of_another_form_are_refused(listed):
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Seal.from_json(listed)
