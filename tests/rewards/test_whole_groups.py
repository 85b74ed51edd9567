"""A sample waits for the others of its group, and for no other sample."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards.whole_groups import WholeGroups
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample

SIZE, GROUPS = 3, 3
PROMPTS = {f"g{number}": Prompt(f"g{number}", (1,), "q", "a") for number in range(GROUPS)}
IDS = [f"{group}/{member}" for group in PROMPTS for member in range(SIZE)]


def sample_of(id):
    return Sample(id, PROMPTS[id.split("/")[0]], f"response {id}", 1, 1)


def restored(groups):
    """What a checkpoint restores; the samples that were lost are those that have a score."""
    state = json.loads(json.dumps([sample.unscored_state_dict() for sample in groups.held()]))
    again = WholeGroups(SIZE)
    lost = {}
    for name, group in groups._groups.items():
        for id, response in group.responses.items():
            if response is None:
                lost.setdefault(name, {})[id] = None
    assert again.restore([Sample.restore(PROMPTS[fields["group"]], fields) for fields in state], lost) == []
    return again


@given(st.permutations(IDS), st.sets(st.sampled_from(IDS)), st.integers(0, 9))
def test_groups_are_released_whole_once_and_every_sample_knows_the_others(order, lost, restored_at):
    groups, ended, released = WholeGroups(SIZE), set(), {}
    for position in range(len(order)):
        if position == restored_at:
            groups = restored(groups)
        id = order[position]
        ended.add(id)
        now = groups.give_up([sample_of(id)]) if id in lost else groups.add([sample_of(id)])
        group = id.split("/")[0]
        members = [other for other in IDS if other.startswith(f"{group}/")]
        arrived = [other for other in members if other not in lost]
        assert [sample.id for sample in now] == (arrived if ended >= {*members} else [])
        for sample in now:
            assert sample.id not in released
            released[sample.id] = sample.others
            assert sample.others == [f"response {other}" for other in arrived if other != sample.id]
    assert released.keys() == {*IDS} - lost and not [*groups.held()]


def test_a_sample_that_arrives_after_it_was_given_up_waits_for_nothing():
    groups = WholeGroups(2)
    assert groups.give_up([sample_of("g0/0")]) == []
    assert [sample.id for sample in groups.add([sample_of("g0/1")])] == ["g0/1"]
    (late,) = groups.add([sample_of("g0/0")])
    assert late.id == "g0/0" and late.others == ()


def test_one_that_had_arrived_when_it_was_given_up_is_counted_once():
    groups = WholeGroups(2)
    groups.add([sample_of("g0/0")])
    assert groups.give_up([sample_of("g0/0")]) == []
    assert [sample.id for sample in groups.add([sample_of("g0/1")])] == ["g0/0", "g0/1"]
