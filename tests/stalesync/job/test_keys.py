"""A key states where it has an effect; refusals, `rlfusion check` and messages follow from it."""

import dataclasses

import pytest

from fusion.telemetry.keys import POSITIVE, SET, key
from stalesync.job.config import Config
from stalesync.job.keys import check_used, groups_of, keys_of, value_of, without_effect


@dataclasses.dataclass
class Inner:
    source: str = "none"
    depth: int = key(1, only={"source": ("one", "both"), "outer.cards": POSITIVE}, why="as nothing is drafted")
    folder: str | None = None
    limit: int | None = key(None, only={"folder": SET}, refused=False)


@dataclasses.dataclass
class Outer:
    cards: int = 0
    inner: Inner = key(factory=Inner, timeless=True, read_by="plan")


@dataclasses.dataclass
class Root:
    outer: Outer = dataclasses.field(default_factory=Outer)


def root(**inner):
    return Root(Outer(inner.pop("cards", 0), Inner(**inner)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"depth": 2},
            r"^outer.inner.depth=2: expected 1 \(the default\) with outer.inner.source=none, as nothing is dr",
        ),
        (
            {"depth": 2, "source": "one"},
            "with outer.cards=0, as .*; it is used with outer.inner.source=one or both and ",
        ),
    ],
)
def test_a_key_that_is_changed_without_an_effect_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_used(root(**changes))


def test_a_key_that_has_an_effect_or_its_default_is_accepted():
    check_used(root(depth=2, source="both", cards=1))
    check_used(root())


def test_a_key_whose_change_is_not_refused_is_listed():
    config = root(limit=3)
    check_used(config)
    assert without_effect(config) == [
        "outer.inner.limit=3 has no effect with outer.inner.folder=null, only with outer.inner.folder set"
    ]
    assert without_effect(root(limit=3, folder="/f")) == []


def test_what_a_group_states_holds_of_its_keys():
    keys = keys_of(Root)
    assert all(keys[f"outer.inner.{name}"].use.timeless for name in ("source", "depth", "folder", "limit"))
    assert keys["outer.inner.depth"].use.read_by == {"plan"} and not keys["outer.cards"].use.timeless


def test_conditions_name_keys_of_the_config():
    groups = dict(groups_of(Config()))
    for path, one in keys_of(Config).items():
        group = path.rpartition(".")[0]
        for name in one.use.only:
            assert name in keys_of(Config) if "." in name else hasattr(groups[group], name), path
    assert not without_effect(Config()) and check_used(Config()) is None
    assert value_of(Config(), "fusion.deployment") == "colocated"
