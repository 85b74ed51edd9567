"""What a resume does with every key: the invariants of `resume_rules.py`, and the cases by name."""

import fnmatch
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.job import resume_rules
from stalesync.job.overrides import known_keys
from stalesync.job.resume_rules import RULES, ResumeChanges, Rule, compare, decide

CONTENT = ("model.path", "reward.model", "reward.path", "reward.terms", "eval.files", "data.source", "run.eval_prompts")
COMPARED = [key for key in known_keys() if RULES.get(key) is not Rule.FOLDER]


def test_every_key_has_exactly_one_rule():
    patterns = [pattern for patterns in resume_rules._KEYS.values() for pattern in patterns.split()]
    by_pattern = [fnmatch.filter(known_keys(), pattern) for pattern in patterns]
    assert all(by_pattern), "every pattern names a key"
    listed = Counter(key for keys in by_pattern for key in keys)
    assert [key for key in known_keys() if key not in listed] == [], "say in resume_rules.py what a resume does with it"
    assert listed.keys() == set(known_keys()) and set(listed.values()) == {1}
    assert {key for key, rule in RULES.items() if rule is Rule.NEVER} == resume_rules._NEVER.keys()


@given(
    settings=st.dictionaries(st.sampled_from(COMPARED), st.sampled_from([(8, 4), (4, 8), (None, 4), (4, None)])),
    content=st.dictionaries(st.sampled_from(CONTENT), st.just("other content of one")),
    num_groups=st.integers(0, 2),
    extra=st.lists(st.sampled_from(COMPARED), max_size=1),
)
def test_exactly_what_is_refused_must_be_named_and_ends_groups_in_progress(settings, content, num_groups, extra):
    changes = ResumeChanges(settings, content, num_groups)
    if never := [key for key in settings if RULES[key] is Rule.NEVER]:
        with pytest.raises(ValueError) as error:
            decide(changes, [*settings, *content])
        assert all(f"{key}=" in str(error.value) for key in never)
        return
    named: set[str] = set()
    try:
        ends = decide(changes, named)
    except ValueError as error:
        named = set(str(error).rpartition("run.resume_changed=[")[2].rpartition("]")[0].split(","))
        assert named <= settings.keys() | content.keys() and all(f"{key}" in str(error) for key in named)
        ends = decide(changes, named)
        for key in named:
            with pytest.raises(ValueError, match=rf"{key}.*cannot resume"):
                decide(changes, named - {key})
    assert content.keys() <= named
    assert ends == any(key in named and key not in content or "NO_GROUPS" in RULES[key].name for key in named) * (
        num_groups > 0
    )
    assert not ends or num_groups
    for key in {*extra} - named:
        with pytest.raises(ValueError, match=rf"run.resume_changed: {key}: expected only keys whose change"):
            decide(changes, named | {key})
        assert decide(changes, named | {key}, undecided=[key]) == ends
    assert not compare(dict.fromkeys(COMPARED, 1), dict.fromkeys(COMPARED, 1)) and not decide(
        ResumeChanges({}, {}, 2), []
    )


@pytest.mark.parametrize(
    ("key", "old", "new", "refused"),
    [
        ("algorithm.group_size", 8, 4, True),
        ("algorithm.group_size", 8, 16, True),
        ("stalesync.max_staleness", 1, 0, True),
        ("stalesync.max_staleness", 1, 2, False),
        ("data.prompts_per_step", 16, 8, True),
        ("data.prompts_per_step", 8, 16, False),
        ("rollout.max_response_length", 64, 32, True),
        ("rollout.sampling.stop", [], ["\n"], True),
        ("algorithm.name", "grpo", "dapo", True),
        ("reward.path", "a.py:score", "b.py:score", True),
        ("rollout.max_length", None, 64, True),
        ("rollout.max_length", 64, None, False),
        ("training.lr", 1e-5, 1e-6, False),
        ("cluster.npus", 4, 2, False),
    ],
)
def test_with_groups_in_progress_a_change_is_right_or_refused_by_key(key, old, new, refused):
    settings = compare({key: old, "run.name": "a"}, {key: new, "run.name": "b", "a.later.key": 1})
    assert settings == {key: (old, new)}
    assert not decide(ResumeChanges(settings, {}, 0), []), "without groups in progress nothing depends on it"
    changes = ResumeChanges(settings, {}, 3)
    if not refused:
        assert not decide(changes, [])
        return
    with pytest.raises(ValueError, match=rf"^{key}=.*: cannot resume.*3 groups .*run.resume_changed=\[{key}\]"):
        decide(changes, [])
    assert decide(changes, [key])


@pytest.mark.parametrize("key", ["rollout.sampling.top_p", "rollout.sampling.top_k", "rollout.sampling.min_p"])
def test_other_filters_are_for_new_tokens_unless_truncated_sampling_begins_or_ends(key):
    settings = {key: (0.5, 0.75)}
    assert not decide(ResumeChanges(settings, {}, 3), []), "every token has the record of its own"
    changes = ResumeChanges(settings, {}, 3, truncation=True)
    with pytest.raises(ValueError, match=rf"^{key}=0.75: cannot resume.*3 groups .*run.resume_changed=\[{key}\]"):
        decide(changes, [])
    assert decide(changes, [key])
    assert not decide(ResumeChanges(settings, {}, 0, truncation=True), [])


def test_every_change_is_listed_in_one_line():
    changes = ResumeChanges(
        {"training.lr": (1e-5, 1e-6), "fusion.checksum": (True, 1)}, {"model.path": "other content of x"}, 0
    )
    assert changes.describe() == (
        "settings changed by this resume: fusion.checksum=1 (was true), training.lr=1e-06 (was 1e-05), "
        "model.path (other content of x)"
    )
    assert not ResumeChanges({}, {}, 3).describe()
