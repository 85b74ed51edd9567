"""Groups under way over a restart: what a checkpoint holds is neither generated, scored nor trained twice, and ends."""

import json
from pathlib import Path
from types import SimpleNamespace

from fusion.rewards import RewardOutcome
from fusion.rollout import SuspendedSample
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from stalesync.admission import Admission
from stalesync.commands import AdmitGroups, AwaitSamples, Dispatch, DispatchedRequest, Suspend, Train
from stalesync.groups import Groups
from stalesync.prompts import Prompt
from stalesync.samples import GeneratedSample
from stalesync.staleness import StalenessLedger
from tests.stalesync.fake_cluster import share_of, spec_of

STATE = json.loads((Path(__file__).parent / "data" / "controller.json").read_text())
"""Of step 4 of a hybrid run of two cards, in the earlier format: seven groups wait to be trained; of e0-10 three
samples are scored, and e0-10/2 is suspended after 57 tokens"""


class Run:
    """Admission and groups of a run without cards: obeys one step's commands, and finishes e0-10/2 when it may."""

    def __init__(self):
        spec = spec_of(
            "hybrid", group_size=4, num_engines=2, shared_engines=frozenset({0}), max_response_tokens=60, ahead=True
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
                    self.dispatched |= {one.id: one for requests in requests_by_engine.values() for one in requests}
                case AwaitSamples():
                    prompt = self.groups.prompts["e0-10"]
                    sample = GeneratedSample("e0-10/2", prompt, "1+0=1", len(prompt.ids), 60, versions=(3, 4))
                    self.groups.note([sample], [sample.scored(RewardOutcome(1.0))])
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
    assert state == {key: STATE[key] for key in ("texts", "expected", "scored", "failed_rewards")}
    assert state["expected"] == ["e0-10"]


def test_a_suspended_sample_of_a_checkpoint_is_resumed_and_its_group_trained_with_those_that_waited():
    run = restored()
    run.step()
    old = {id: request for id, request in run.dispatched.items() if not id.startswith("new-")}
    assert old == {"e0-10/2": DispatchedRequest("e0-10/2", "e0-10", earlier="e0-10/2~57")}
    assert run.trained.keys() == {*STATE["ledger"]["finished"], "e0-10"} and not run.ended
    assert all(len({sample.id for sample in samples}) == 4 for samples in run.trained.values())
    texts = {fields["id"]: fields["text"] for fields in STATE["texts"]}
    assert {(group, one.prompt.text) for group, samples in run.trained.items() for one in samples} == texts.items()
    resumed = next(sample for sample in run.trained["e0-10"] if sample.id == "e0-10/2")
    assert (resumed.outcome.reward, resumed.oldest, resumed.newest) == (1.0, 3, 4)
    ledger = run.admission.ledger
    assert (ledger.version, ledger.ended["trained"], ledger.ages) == (5, 32 + 8, {0: 8, 1: 24 + 8})
    assert run.dispatched.keys() - old.keys() and all(group.startswith("new-") for group in run.groups.prompts)
