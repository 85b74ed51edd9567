"""Groups under way over a restart: what a checkpoint holds is neither generated, scored nor trained twice, and ends."""

import json
from pathlib import Path
from types import SimpleNamespace

from distqueue import LostSample
from fusion.inference.request import NO_REWARDS
from fusion.rewards import RewardOutcome
from fusion.rollout import SuspendedSample
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from stalesync.loop.groups import Groups
from stalesync.loop.sample_columns import SampleColumns
from stalesync.policy.admission import Admission
from stalesync.policy.commands import AdmitGroups, AwaitSamples, Dispatch, Suspend, Train
from stalesync.policy.reward_history import RewardHistory
from stalesync.policy.staleness import StalenessLedger
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from tests.stalesync.fake_cluster import share_of, spec_of, with_outcome

STATE = json.loads((Path(__file__).parents[1] / "data" / "controller.json").read_text())
"""Of step 4 of a hybrid run of two cards, in the earlier format: seven groups wait to be trained; of e0-10 three
samples are scored, and e0-10/2 is suspended after 57 tokens"""


def test_trained_groups_are_logged_in_the_order_in_which_they_were_admitted():
    rows, admitted = [], ["e0-12", "e0-3", "e1-0", "e0-1"]
    groups = Groups(
        size=2,
        admission=SimpleNamespace(ledger=SimpleNamespace(lag=lambda group: 0)),
        prompts={group: Prompt(group, (3, 4), "", "") for group in admitted},
        algorithm=make_algorithm(AlgorithmConfig(), 60),
        queue=None,
        folder=SimpleNamespace(log_groups=lambda step, groups, ended, lag, tokens: rows.append((groups, tokens))),
    )
    for length, (group, prompt) in enumerate(groups.prompts.items()):
        samples = [Sample(f"{group}/{k}", prompt, "1", 2, 10 + length) for k in range(2)]
        groups.scored[group] = [with_outcome(one, RewardOutcome(1.0)) for one in samples]
    trained = ["e0-1", "e0-12", "e0-3"]  # as the ledger names groups of one age
    samples, _ = groups.take(trained)
    groups.log_trained(trained, samples, [])
    (logged, tokens), *others = rows
    assert logged == ["e0-12", "e0-3", "e0-1"] and not others
    assert tokens["response_tokens"] == [[10, 10], [11, 11], [13, 13]]


class Run:
    """Admission and groups of a run without cards: executes one step's commands, and finishes e0-10/2 when it may."""

    def __init__(self, ahead=True):
        spec = spec_of(
            "hybrid", group_size=4, num_engines=2, shared_engines=frozenset({0}), max_response_tokens=60, ahead=ahead
        )
        self.admission = Admission(spec, StalenessLedger(1, 8))
        self.ended, self.dispatched, self.trained = [], {}, {}
        folder = SimpleNamespace(log_groups=lambda step, groups, how: self.ended.append((groups, how)))
        self.groups = Groups(
            size=4,
            admission=self.admission,
            prompts={},
            algorithm=make_algorithm(AlgorithmConfig(), 60),
            queue=SimpleNamespace(drop=lambda ids, reason: self.ended.append((ids, reason))),
            folder=folder,
        )

    def step(self):
        for command in self.admission.step(2, share_of((0, 1))):
            match command:
                case AdmitGroups(count):
                    self.groups.admit(Prompt(f"new-{k}", (3, 4), "", "") for k in range(count))
                case Dispatch(requests_by_engine):
                    for requests in requests_by_engine.values():
                        self.dispatched |= {row[0]: row for row in zip(*vars(requests).values(), strict=True)}
                case AwaitSamples():
                    prompt = self.groups.prompts["e0-10"]
                    sample = Sample("e0-10/2", prompt, "1+0=1", len(prompt.ids), 60, oldest=3, newest=4)
                    self.groups.note([sample], [with_outcome(sample, RewardOutcome(1.0))])
                case Suspend(engines):
                    for engine in engines:
                        running = [entry for entry in self.admission.buffer.of("running") if entry.engine == engine]
                        unstarted = [SuspendedSample(entry.id, 0, "", None, None) for entry in running]
                        self.admission.observe_stopped(engine, unstarted)
                case Train(groups):
                    self.trained, _ = self.groups.take(groups)
                    self.admission.observe_trained(groups)


def restored():
    run = Run()
    run.admission.load_state_dict(STATE)
    run.groups.load_state_dict(STATE)
    return run


def test_groups_of_a_checkpoint_are_restored_to_the_letter():
    state = json.loads(json.dumps(restored().groups.state_dict()))
    expected = {key: STATE[key] for key in ("texts", "scored", "failed_rewards")}
    for each in (state, expected):  # the earlier format has the samples of a group in order of arrival
        each["scored"] = sorted(each["scored"], key=lambda fields: fields["id"])
    assert state == expected


def test_a_suspended_sample_of_a_checkpoint_is_resumed_and_its_group_trained_with_those_that_waited():
    run = restored()
    run.step()
    old = {id: request for id, request in run.dispatched.items() if not id.startswith("new-")}
    assert old == {"e0-10/2": ("e0-10/2", "e0-10", "e0-10/2~57", None, 0, 0, None, 0)}
    groups = {*STATE["ledger"]["finished"], "e0-10"}
    assert list(run.trained.ids) == sorted(f"{group}/{member}" for group in groups for member in range(4))
    assert not run.ended and {*run.trained.groups} == groups
    texts = {fields["id"]: fields["text"] for fields in STATE["texts"]}
    assert {(one.prompt.id, one.prompt.text) for one in run.trained.samples} == texts.items()
    resumed = next(sample for sample in run.trained.samples if sample.id == "e0-10/2")
    assert (resumed.outcome.reward, resumed.oldest, resumed.newest) == (1.0, 3, 4)
    ledger = run.admission.ledger
    assert (ledger.version, ledger.ended["trained"], ledger.ages) == (5, 32 + 8, {0: 8, 1: 24 + 8})
    assert run.dispatched.keys() - old.keys() and all(group.startswith("new-") for group in run.groups.prompts)


def _lost(*ids):
    return [LostSample(id, id.split("/")[0], "lost:damaged") for id in ids]


def _generated(run, id):
    prompt = run.groups.prompts[id.split("/")[0]]
    return Sample(id, prompt, "2", len(prompt.ids), 3)


def _begun(groups):
    """A run all of whose requests are on engines."""
    run = Run(ahead=False)
    commands = run.admission.step(2, share_of((0, 1)))
    for command in commands:
        match command:
            case AdmitGroups(count):
                assert count >= groups
                run.groups.admit(Prompt(f"g{k}", (3, 4), "", "") for k in range(count))
            case AwaitSamples():
                return run


def test_a_sample_that_is_lost_before_it_arrives_counts_as_one_that_cannot_be_scored():
    run = _begun(2)
    note, prompts = run.groups.note, run.groups.prompts
    given_up = run.groups.note_lost([*_lost("g0/0", "g9999/0"), LostSample("g0/1~57", "", "lost:damaged")])
    assert [sample.id for sample in given_up] == ["g0/0"]
    assert run.groups.num_noted_lost == 3
    late = _generated(run, "g0/0")
    note([late], [with_outcome(late, RewardOutcome(1.0))])  # it was on its way to its score
    assert [one.outcome.error for one in run.groups.scored["g0"]] == ["lost"], "once"
    for reward, member in enumerate("123"):
        sample = _generated(run, f"g0/{member}")
        note([sample], [with_outcome(sample, RewardOutcome(float(reward)))])
    assert "g0" in prompts and not run.ended, "its group goes on without it"
    run.groups.note_lost(_lost(*(f"g1/{member}" for member in range(4))))
    assert "g1" not in prompts
    assert (["g1"], "failed:lost") in run.ended and run.admission.ledger.ended["failed:lost"] == 1


def test_a_lost_branch_ends_its_conversation_only_if_it_is_the_current_one():
    run = _begun(2)
    entry = run.admission.buffer.entries["g0/0"]
    run.admission.observe_chunks_ended(entry.engine, [SuspendedSample("g0/0", 4, "g0/0~4", (0, 0), turn=True)])
    run.admission.observe_branched("g0/0", 5, 50)
    assert run.groups.note_lost(_lost("g0/0")) == [] and entry.state == "waiting"
    run.admission.buffer.dispatch([0])
    (given_up,) = run.groups.note_lost(_lost("g0/0.1"))
    assert entry.state == "finished" and given_up.rows == ["g0/0", "g0/0.1"], "both are dropped with its group"
    late = _generated(run, "g0/0")
    run.groups.note([late], [])  # it is counted already
    (trained,) = samples = [_generated(run, "g1/0")]
    trained.row_tokens, trained.outcome = (4, 5), RewardOutcome(1.0)
    assert run.groups.untrained(["g1"], SampleColumns.of(samples)) == []
    run.groups.note_lost(_lost("g1/0.1"))
    assert run.groups.untrained(["g1"], SampleColumns.of(samples)) == ["g1"]


def test_the_next_group_of_a_row_gets_the_rewards_of_a_group_that_may_be_trained():
    run = _begun(2)
    run.groups.rewards = history = RewardHistory()
    outcomes = [RewardOutcome(None, error="timeout"), RewardOutcome(1.0), RewardOutcome(0.0), RewardOutcome(0.5)]
    for member in (2, 0, 3, 1):
        sample = _generated(run, f"g0/{member}")
        run.groups.note([sample], [with_outcome(sample, outcomes[member])])
    assert history.of("e1-g0") == ("g0", (None, 1.0, 0.0, 0.5))
    for member in range(4):
        sample = _generated(run, f"g1/{member}")
        run.groups.note([sample], [with_outcome(sample, RewardOutcome(None, error="timeout"))])
    assert history.of("e1-g1") == NO_REWARDS, "it has failed"
    state, after = json.loads(json.dumps(run.groups.state_dict())), Run()
    after.groups.rewards = RewardHistory()
    after.groups.load_state_dict(state)
    assert after.groups.rewards.of("e1-g0") == history.of("e1-g0")


def test_a_sample_that_is_lost_after_it_was_scored_costs_its_group_only_if_it_was_the_last():
    run = _begun(2)
    for group in ("g0", "g1"):
        for member in range(4):
            sample = _generated(run, f"{group}/{member}")
            run.groups.note([sample], [with_outcome(sample, RewardOutcome(float(member % 2)))])
    samples, _ = run.groups.take(["g0", "g1"])
    assert run.groups.note_lost(_lost("g0/2", *(f"g1/{member}" for member in range(4)))) == []
    assert run.groups.untrained(["g0", "g1"], samples) == ["g1"]
    for group in run.groups.prompts:
        run.admission.ledger.fail(group, "other")
    run.admission.observe_trained(["g0", "g1"], ["g1"])
    ended = run.admission.ledger.ended
    assert (ended["trained"], ended["failed:lost"]) == (1, 1)


def test_however_many_groups_end_at_once_the_queue_is_called_once_for_each_reason():
    run = _begun(3)
    samples = [_generated(run, f"g{group}/{member}") for group in range(3) for member in range(4)]
    outcomes = {group: RewardOutcome(None, error=error) for group, error in ERRORS.items()}
    run.groups.note(samples, [with_outcome(sample, outcomes[sample.prompt.id]) for sample in samples])
    drops = [(len(ids), reason) for ids, reason in run.ended if ":" not in reason]
    assert drops == [(8, "reward_raised"), (4, "reward_timeout")]
    assert [groups for groups, ended in run.ended if ":" in ended] == [["g0"], ["g1"], ["g2"]]


ERRORS = {"g0": "raised", "g1": "timeout", "g2": "raised"}
