"""The sample table against a model that is too plain to be wrong: a list of dicts, searched from the front."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distqueue.table import SampleTable, Want

TASKS, COLUMNS, LEASE_S, GROUP_SIZE = ("reward", "train"), ("x", "y"), 10.0, 2
WANTED_COLUMNS = st.sampled_from([("x",), ("y",), ("x", "y")])


class TableAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.model: list[dict] = []

    @initialize(grouped=st.booleans())
    def create(self, grouped: bool) -> None:
        self.group_size = GROUP_SIZE if grouped else None
        self.table = SampleTable(TASKS, LEASE_S, self.group_size)

    def live(self) -> list[dict]:
        return [row for row in self.model if row["end"] is None]

    def state(self, row: dict, task: str) -> str:
        claim = row["claims"][task]
        expired = isinstance(claim, float) and claim + LEASE_S <= self.now_s
        return "open" if claim is None or expired else "acked" if claim == "acked" else "leased"

    @rule(columns=st.sets(st.sampled_from(COLUMNS)), tokens=st.integers(0, 5), version=st.integers(0, 3))
    def put_new(self, columns: set[str], tokens: int, version: int) -> None:
        id, group = f"s{len(self.model)}", f"g{len(self.model) // GROUP_SIZE}"
        late = self.table.put([id], {name: [tokens] for name in columns}, [group], [(version, version)], self.now_s)
        assert late == ()
        self.model.append(
            {"id": id, "group": group, "columns": dict.fromkeys(columns, tokens), "end": None,
             "claims": dict.fromkeys(TASKS), "handed": set(), "versions": (version, version)}
        )  # fmt: skip

    @precondition(lambda self: self.model)
    @rule(data=st.data(), column=st.sampled_from(COLUMNS), tokens=st.integers(0, 5), version=st.integers(0, 3))
    def extend(self, data: st.DataObject, column: str, tokens: int, version: int) -> None:
        row = data.draw(st.sampled_from(self.model))
        arguments = ([row["id"]], {column: [tokens]}, [], [(version, version)], self.now_s)
        if row["end"] == "done" or (row["end"] is None and column in row["columns"]):
            self.refused(lambda: self.table.put(*arguments), row["id"])
        elif row["end"]:
            assert self.table.put(*arguments) == (row["id"],), "a straggler's column for a dropped sample is late"
        else:
            assert self.table.put(*arguments) == ()
            row["columns"][column] = tokens
            row["versions"] = (min(row["versions"][0], version), max(row["versions"][1], version))

    @rule(
        task=st.sampled_from(TASKS),
        columns=WANTED_COLUMNS,
        count=st.none() | st.sampled_from([1, 2, 4]),
        budget=st.none() | st.integers(1, 12),
        whole=st.booleans(),
    )
    def get(self, task: str, columns: tuple[str, ...], count: int | None, budget: int | None, whole: bool) -> None:
        if count is None and budget is None:
            return
        whole = whole and self.group_size is not None and count != 1
        want = Want(task, columns, count, budget, whole_groups=whole)
        self.table.check(want)
        self.table.expire(self.now_s)
        ids = self.table.plan(want)
        assert ids == self.expected(want)
        if ids:
            self.table.lease(task, ids, columns, self.now_s)
            for row in self.model:
                if row["id"] in ids:
                    row["claims"][task] = self.now_s
                    row["handed"].add(task)
        else:
            assert "missing for" in self.table.explain(want) or not self.live() or self.all_ready(want)

    def all_ready(self, want: Want) -> bool:
        return all(name in row["columns"] for row in self.live() for name in want.columns
                   if self.state(row, want.task) == "open")  # fmt: skip

    def expected(self, want: Want) -> tuple[str, ...] | None:
        def ready(row: dict) -> bool:
            return self.state(row, want.task) == "open" and set(want.columns) <= row["columns"].keys()

        if want.whole_groups:
            units = []
            for group in dict.fromkeys(row["group"] for row in self.model):
                members = [
                    row for row in self.live() if row["group"] == group and self.state(row, want.task) != "acked"
                ]
                is_whole = sum(row["group"] == group for row in self.model) == GROUP_SIZE
                if members and is_whole and all(ready(row) for row in members):
                    units.append(members)
        else:
            units = [[row] for row in self.live() if ready(row)]
        slots = GROUP_SIZE if want.whole_groups else 1
        tokens = [sum(max(row["columns"][name] for name in want.columns) for row in unit) for unit in units]
        for k in range(1, len(units) + 1):
            filled = want.token_budget is not None and (
                sum(tokens[:k]) >= want.token_budget or (k < len(units) and sum(tokens[: k + 1]) > want.token_budget)
            )
            if filled or k * slots == want.count:
                return tuple(row["id"] for unit in units[:k] for row in unit)
        return None

    @precondition(lambda self: any(row["handed"] for row in self.model))
    @rule(data=st.data(), task=st.sampled_from(TASKS))
    def ack(self, data: st.DataObject, task: str) -> None:
        handed = [row for row in self.model if task in row["handed"]]
        rows = data.draw(st.lists(st.sampled_from(handed), max_size=3)) if handed else []
        done = self.table.ack(task, [row["id"] for row in rows])
        for row in rows:
            if row["end"] is None:
                row["claims"][task] = "acked"
                if set(row["claims"].values()) == {"acked"}:
                    row["end"] = "done"
                    assert row["id"] in done

    @precondition(lambda self: self.live())
    @rule(data=st.data(), task=st.sampled_from(TASKS))
    def ack_of_what_was_never_handed_out(self, data: st.DataObject, task: str) -> None:
        ids = [row["id"] for row in data.draw(st.permutations(self.live()))]
        if not all(task in row["handed"] for row in self.live()):
            self.refused(lambda: self.table.ack(task, ids), "which never got it")

    @precondition(lambda self: self.live())
    @rule(data=st.data(), reason=st.sampled_from(["stale", "filtered"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        row = data.draw(st.sampled_from(self.live()))
        assert self.table.drop([row["id"]], reason) == (row["id"],)
        assert self.table.drop([row["id"]], "again") == ()
        row["end"] = f"dropped:{reason}"

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    def refused(self, call: object, message: str) -> None:
        before = repr((self.table.rows, self.table.groups, self.table.ended))
        with pytest.raises(ValueError, match=message):
            call()
        assert repr((self.table.rows, self.table.groups, self.table.ended)) == before

    @invariant()
    def rows_are_the_models(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.expire(self.now_s)
        got = [
            (row.id, row.group, row.versions, row.columns, {task: claim.state for task, claim in row.claims.items()})
            for row in self.table.rows.values()
        ]
        assert got == [
            (row["id"], row["group"], row["versions"], row["columns"], {task: self.state(row, task) for task in TASKS})
            for row in self.live()
        ]
        assert self.table.ended == Counter(row["end"] for row in self.model if row["end"])
        held = [
            row["claims"][task] + LEASE_S for row in self.live() for task in TASKS if self.state(row, task) == "leased"
        ]
        assert not held or self.table.next_expiry_s() <= min(held)


TableAgainstModel.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_table_against_model = TableAgainstModel.TestCase


def table_of(*ids: str, **options: object) -> SampleTable:
    table = SampleTable(["train"], 10.0, **options)
    table.put(ids, {"tokens": [3] * len(ids)}, ["g"] * len(ids), [], 0.0)
    return table


def test_a_column_a_sample_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 'b' lacks column 'reward'; it has \['tokens'\]"):
        table_of("b").lease("train", ["b"], ["tokens", "reward"], 0.0)
    with pytest.raises(ValueError, match="sample 'z': never put"):
        table_of("b").check_columns(["z"], [])


def test_a_group_goes_on_without_a_dropped_member() -> None:
    table = table_of("a", "b", "c", group_size=3)
    table.put(["c"], {"reward": [1]}, [], [], 0.0)
    want = Want("train", ("tokens", "reward"), 3, whole_groups=True)
    assert table.plan(want) is None
    assert table.explain(want).endswith("1 samples ready, column 'reward' missing for 2, 0 groups not all put")
    table.drop(["a", "b"], "reward failed")
    assert table.plan(want) == ("c",)


def test_an_expired_group_comes_back_without_the_members_acknowledged() -> None:
    table = table_of("a", "b", group_size=2)
    want = Want("train", ("tokens",), 2, whole_groups=True)
    table.lease("train", table.plan(want), want.columns, 0.0)
    table.ack("train", ["a"])
    assert table.plan(want) is None
    table.expire(10.0)
    assert table.plan(want) == ("b",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SampleTable([], 1.0), "tasks=.*at least one"),
        (lambda: SampleTable(["a"], 0.0), "lease_s=0.0: expected"),
        (lambda: Want("train", ("x",)), "expected count or token_budget"),
        (lambda: Want("train", ("x",), 0), "count=0: expected a positive"),
        (lambda: Want("train", (), 1), "expected the columns"),
        (lambda: table_of("a").check(Want("trian", ("x",), 1)), r"task 'trian': this queue serves \('train',\)"),
        (lambda: table_of("a").check(Want("train", ("x",), 1, whole_groups=True)), "without group_size"),
        (
            lambda: table_of("a", group_size=2).check(Want("train", ("x",), 3, whole_groups=True)),
            "multiple of group_size=2",
        ),
        (lambda: table_of("a", "b", "c", group_size=2), "group 'g': 3 samples, but the queue has group_size=2"),
        (lambda: table_of("a", group_size=2).put(["d"], {}, [], [], 0.0), "sample 'd': no group"),
        (lambda: table_of("a").put(["a"], {}, ["h"], [], 0.0), "group 'h', but it was put in group 'g'"),
        (lambda: table_of("a").drop(["a"], ""), "expected a reason"),
    ],
)
def test_wrong_use_is_refused_by_name(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
