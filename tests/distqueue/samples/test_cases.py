"""What the table refuses and how it says so, and cases worth a test of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from distqueue.messages import names_to_array
from distqueue.samples import SampleTable, Selection
from tests.distqueue.samples.inspect_table import nbytes


def table_of(*ids: str, **options: int) -> SampleTable:
    """Samples of one group that hold `tokens`, 3 each."""
    table = SampleTable(["train"], 10.0, **options)
    table.put(ids, {"tokens": np.full(len(ids), 3)}, segment=0, groups=["g"] * len(ids))
    return table


def ended_table() -> SampleTable:
    """a is done, b dropped."""
    table = table_of("a", "b")
    table.take(Selection("train", ("tokens",), 2), 0.0)
    table.ack("train", ["a"])
    table.drop(["b"], "stale")
    return table


def claimed_table() -> SampleTable:
    """The task holds a; b is open."""
    table = table_of("a", "b")
    table.claim("train", ["a"], 0.0)
    return table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SampleTable([], 1.0), r"tasks=\(\): expected at least one, all different"),
        (lambda: SampleTable(["a", "a"], 1.0), "tasks=.*all different"),
        (lambda: SampleTable(["a"], 0.0), "lease_s=0.0: expected seconds > 0"),
        (lambda: Selection("train", ("x",)), "expected count, or partial=True"),
        (lambda: Selection("train", ("x",), 0), "count=0: expected a positive"),
        (lambda: Selection("train", (), 1), r"columns=\(\): expected the columns to read"),
        (lambda: Selection("train", "tokens", 1), "columns='tokens': expected a list of names"),
        (lambda: Selection("train", ("x",), 1, lengths="tokens"), "lengths='tokens': expected a list of names"),
        (lambda: table_of("a").take(Selection("trian", ("x",), 1), 0.0), r"'trian': this queue serves \('train',\)"),
        (lambda: table_of("a").put(["a"], {}, segment=1, groups=["h"]), "group 'h', but it was put in group 'g'"),
        (lambda: table_of("a").put(["b", "a"], {"tokens": None}, segment=1), "'a': column 'tokens' exists already"),
        (lambda: table_of("a").put(["b", "b"], {}, segment=1), "ids of a batch must be distinct; repeated: b"),
        (lambda: table_of("a\0"), r"'a\\x00': expected a name without a NUL"),
        (lambda: table_of("a").put(["b"], {f"c{k}": None for k in range(64)}, segment=1), "'c63': expected at most 64"),
        (lambda: ended_table().put(["a"], {"x": None}, segment=1), "'a': every task has acknowledged it"),
        (lambda: ended_table().check_put(["a"], ["x"]), "sample 'a': every task has acknowledged it; no column can"),
        (lambda: table_of("b").find(["b"], ["tokens", "reward"]), "sample 'b' lacks column 'reward'; it has"),
        (lambda: table_of("b").find(["b"], ["reward"]), r"column 'reward'; it has \['tokens'\]"),
        (lambda: table_of("b").find(["b", "z"]), "sample 'z': never put"),
        (lambda: ended_table().find(["b"]), "sample 'b': dropped:stale"),
        (lambda: table_of("a").ack("train", ["a"]), "'a': acknowledged by task 'train', which never received"),
        (lambda: table_of("a").ack("train", ["z"]), "sample 'z': never put, or ended long ago"),
        (lambda: table_of("a").claim("train", ["a", "z"], 0.0), "sample 'z': never put"),
        (lambda: ended_table().claim("train", ["b"], 0.0), "sample 'b': dropped:stale"),
        (lambda: claimed_table().claim("train", ["b", "a"], 0.0), "sample 'a': task 'train' has leased it already"),
        (lambda: table_of("a").lengths(["a"], ["reward"]), "sample 'a' lacks column 'reward'"),
        (lambda: table_of("a").renew("train", ["z"], 0.0), "sample 'z': never put, or ended long ago"),
        (lambda: table_of("a").drop(["a"], ""), "drop: expected a reason"),
        (lambda: table_of("a").lose(["a"], ""), "lose: expected a reason"),
    ],
)  # fmt: skip
def test_wrong_use_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_why_a_want_waits_is_explained() -> None:
    table = table_of("a", "b", "c")
    table.put(["c"], {"reward": None}, segment=1)
    selection = Selection("train", ("tokens", "reward"), 3)
    assert table.take(selection, 0.0) is None
    assert table.explain(selection) == (
        "task 'train' requests 3 samples with ['tokens', 'reward']: 1 samples ready, column 'reward' missing for 2"
    )
    never_put = Selection("train", ("advantage",), partial=True)
    assert table.explain(never_put).endswith("requests any samples with ['advantage']: 0 samples ready, column "
                                             "'advantage' missing for 3")  # fmt: skip


def test_a_lease_ends_for_those_who_are_still_out_under_it() -> None:
    table = table_of("a", "b", "c")
    assert table.take(Selection("train", ("tokens",), 3), 0.0) is not None
    table.drop(["a"], "stale")
    table.put(["d"], {"tokens": None}, segment=1)
    table.renew("train", ["b", "d"], 5.0)
    assert (table.expire(10.0), table.next_expiry_s(), table.open("train")) == (1, 15.0, 2)
    assert (table.expire(15.0), table.next_expiry_s(), table.open("train")) == (1, None, 3)


def test_a_lease_that_an_acknowledgement_has_ended_is_not_released() -> None:
    table = SampleTable(["train", "reward"], 10.0)
    table.put(["a", "b"], {"tokens": np.full(2, 3)}, segment=0, groups=["g"] * 2)
    assert table.take(Selection("train", ("tokens",), 2), 0.0) is not None
    table.ack("train", ["a"])
    table.release_lease("train", ["a", "b"])
    assert (table.open("train"), table.open("reward")) == (1, 2), "nobody gets a twice"


def test_an_ending_of_long_ago_is_forgotten() -> None:
    table = table_of("a", "b", "c", remembered=2)
    for id in ("a", "b", "c"):
        table.drop([id], "stale")
    assert table.put(["c", "b"], {"tokens": None}, segment=1) == ("c", "b")
    assert table.put(["a"], {"tokens": None}, segment=1) == ()
    with pytest.raises(ValueError, match="'z': never put, or ended long ago"):
        table.ack("train", ["c", "z"])


def test_a_snapshot_of_an_earlier_version_which_names_what_has_ended_is_read() -> None:
    snapshot = ended_table().snapshot()
    earlier = {name: value for name, value in snapshot.items() if name != "ended_mark"}
    restored = SampleTable.restore(earlier | {"ended_id": names_to_array(["a", "b"])}, 10.0)
    assert restored.snapshot()["ended_mark"].tolist() == snapshot["ended_mark"].tolist()
    assert restored.put(["b"], {"x": None}, segment=1) == ("b",)


def test_a_snapshot_of_an_earlier_version_which_numbers_groups_is_read() -> None:
    table = table_of("a", "b")
    table.put(["c"], {"tokens": np.array([3])}, segment=1)
    snapshot = table.snapshot()
    about = json.loads(str(snapshot["about"])) | {"group_size": 2, "next_group": 8}
    earlier = {"about": json.dumps(about), "row_group": np.array([0, 0, -1], np.int32), "group": np.array([7])}
    earlier |= {"group_name": names_to_array(["g"]), "group_put": np.array([2], np.int32)}
    assert SampleTable.restore(snapshot | earlier, 10.0).find(["a", "b", "c"]).groups == ("g", "g", "")


def test_a_column_may_be_dense_in_one_put_and_ragged_in_another() -> None:
    table = table_of("a")
    table.put(["a"], {"x": None}, segment=1)
    table.put(["b"], {"x": np.array([5])}, segment=2)
    table.put(["c"], {"x": None}, segment=3)
    assert table.lengths(["a", "b", "c"], ["x"]).tolist() == [[1, 5, 1]]


def test_memory_follows_what_is_alive() -> None:
    table = SampleTable(["train"], 10.0, page_rows=64, remembered=100)
    sizes = []
    for step in range(60):
        ids = [f"{step}-{k}" for k in range(64)]
        table.put(ids, {"tokens": np.full(64, 3)}, segment=step, groups=[f"{step}-{k // 4}" for k in range(64)])
        taken = table.take(Selection("train", ("tokens",), 64), float(step))
        assert taken is not None and taken.ids == tuple(ids)
        assert table.ack("train", ids).segments == (step,)
        sizes.append(nbytes(table))
    assert sizes[-1] == sizes[10] and len(table) == 0
