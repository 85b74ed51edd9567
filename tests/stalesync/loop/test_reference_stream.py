"""The invariants of `stalesync.loop.reference_stream`, with cards that answer late."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate import Worker
from fusion.model import Parallel
from fusion.rewards import RewardOutcome
from fusion.training import TrainingConfig
from stalesync.cards.stage_calls import RunningStage
from stalesync.loop.reference_stream import ReferenceStream
from stalesync.loop.sample_columns import SampleColumns
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample

APART, RANKS, GROUP, FAILED = Parallel(2), (2, 3), 3, "g1/1"


class ScoreCards:
    """Answers calls in order, the first one at each `answer`; whoever waits polls the stream meanwhile."""

    def __init__(self):
        self.calls, self.stream, self._stages = [], None, []

    def begin_each(self, calls):
        assert tuple(calls) == RANKS and {call.stage for call in calls.values()} == {Worker.reference.__name__}
        ids = [id for call in calls.values() for id in call.args[0]]
        self.calls.append(ids)
        self._stages.append(RunningStage("reference", RANKS, {len(self._stages): 2}, dict.fromkeys(RANKS, ids)))
        return self._stages[-1]

    def answer(self):
        for stage in [stage for stage in self._stages if stage.pending][:1]:
            stage.pending.clear()

    def wait(self, running):
        while running.pending:
            self.answer()
            self.stream.begin()
        return [SimpleNamespace(reference_kl={id: _kl_of(id) for id in running.results[2]})]

    @property
    def num_pending(self):
        return sum(bool(stage.pending) for stage in self._stages)


def _kl_of(id):
    return float(sum(map(ord, id)))


def _group(name):
    members, prompt = [], Prompt(name, (1, 2), "1+1=", "2")
    for member in range(GROUP):
        sample = Sample(f"{name}/{member}", prompt, "2", 2, 3 + member)
        sample.outcome = RewardOutcome(None, "raised") if sample.id == FAILED else RewardOutcome(1.0)
        members.append(sample)
    return members


def _ids(groups):
    return [sample.id for group in groups for sample in _group(group) if sample.id != FAILED]


def _stream(ahead=True, reference=APART):
    cards, reports = ScoreCards(), []
    deployment, training = SimpleNamespace(reference=RANKS), TrainingConfig()
    spec = SimpleNamespace(reference=reference, ahead=ahead, deployment=deployment, training=training)
    cards.stream = ReferenceStream(spec=spec, cards=cards, record_reports=reports.extend)
    return cards.stream, cards, reports


@given(st.booleans(), st.lists(st.sampled_from("cccbbat"), max_size=40), st.randoms())
def test_every_complete_group_is_part_of_one_call_and_training_waits_for_its_own_groups_alone(ahead, events, random):
    stream, cards, reports = _stream(ahead)
    complete, left = [], []
    for event in events:
        match event:
            case "c":
                complete.append(f"g{len(complete)}")
                left.append(complete[-1])
                stream.observe(_group(complete[-1]))
            case "b":
                stream.begin()
            case "a":
                cards.answer()
            case "t":
                groups = random.sample(left, random.randint(0, len(left)))
                left = [group for group in left if group not in groups]
                answered = len(cards.calls) - cards.num_pending
                assert stream.take(groups) == {id: _kl_of(id) for id in _ids(groups)}
                last = max([at for at, ids in enumerate(cards.calls) if {*ids} & {*_ids(groups)}], default=-1)
                assert len(cards.calls) - cards.num_pending == max(answered, last + 1), "it waits for no later call"
    stream.settle()
    assert sorted(id for ids in cards.calls for id in ids) == sorted(_ids(complete))
    assert not cards.num_pending and len(reports) == len(cards.calls)
    assert {*stream.state_dict()["reference_kl"]} == {*left}, "what was taken is forgotten"
    if not ahead:
        assert all(len({id.split("/")[0] for id in ids}) == 1 for ids in cards.calls)


def test_above_staleness_0_a_call_is_of_all_that_are_complete():
    stream, cards, _ = _stream()
    for name in ("g0", "g2"):
        stream.observe(_group(name))
    stream.begin()
    stream.observe(_group("g3"))
    stream.begin()
    assert [sorted(ids) for ids in cards.calls] == [_ids(["g0", "g2"]), _ids(["g3"])]


@pytest.mark.parametrize("reference", [APART, None], ids=["on cards of its own", "on the cards that train"])
def test_a_checkpoint_tells_what_is_computed_also_where_the_resumed_run_has_no_such_cards(reference):
    stream, _, _ = _stream()
    stream.observe(_group("g0"))
    stream.settle()
    state = json.loads(json.dumps(stream.state_dict()))
    resumed, cards, _ = _stream(reference=reference)
    resumed.load_state_dict({"other": 1} | state, [_group("g0"), _group("g2")])
    samples = SampleColumns.of([*_group("g0"), *_group("g2")])
    assert resumed.missing(samples).ids == _ids(["g2"])
    found = resumed.take(["g0", "g2"])
    assert found == {id: _kl_of(id) for id in _ids(["g0", "g2"] if reference else ["g0"])}
    assert [sorted(ids) for ids in cards.calls] == ([_ids(["g2"])] if reference else [])
    resumed.load_state_dict({}, [])
    assert resumed.missing(samples) is samples
