"""The invariants of `policy/admission.py`, over engines that finish, end chunks, filter and fail in random order."""

import json
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.rollout import HistoPipeSpec, PoolRouting, SuspendedSample
from stalesync.policy.admission import Admission
from stalesync.policy.commands import AdmitGroups, AwaitSamples, Dispatch, Publish, Suspend, Train
from stalesync.policy.staleness import StalenessLedger
from tests.stalesync.fake_cluster import FakeCluster, share_of, spec_of

STEPS = 5
OUTCOMES = [("ok",), ("ok", "ok", "filtered"), ("ok", "failed"), ("filtered", "failed", "ok")]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["colocated", "hybrid", "separate"]),
    st.integers(0, 2),
    st.sampled_from([None, 25, 60]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_random_run_keeps_the_bound_ends_every_group_and_never_stalls(deployment, bound, tokens, overlapped, random):
    batch, size = random.randint(1, 6), random.randint(1, 3)
    filters = random.choice([0, batch, 10 * batch])
    chunks, outcomes = random.random() < 0.5, random.choice(OUTCOMES)
    keeps_kv, slots = random.random() < 0.5, random.randint(1, 3)
    order = random.choice(["fifo", "least_generated", "context", "history", "histopipe"])
    classes = HistoPipeSpec(4, slots, size, num_classes=random.randint(1, 5))
    spec = spec_of(
        deployment,
        group_size=size,
        chunk_tokens=random.randint(1, 9) if chunks else 0,
        order=order,
        histopipe=classes if order == "histopipe" else None,
        filters="filtered" in outcomes or random.random() < 0.5,
        engine_slots=slots,
        max_filtered_groups=filters,
        ahead=bound > 0,
        scores_overlapped=overlapped,
        keeps_kv=keeps_kv,
        kv_pool=PoolRouting(random.randint(0, 3), 4) if keeps_kv and random.random() < 0.5 else None,
        num_probes=random.randint(0, 2),
        lends=bound > 0 and tokens is None and overlapped and deployment != "colocated" and random.random() < 0.7,
        minibatches=random.choice([1, 1, 2, 3]),
        turns=random.random() < 0.5,
    )
    ledger = StalenessLedger(bound, batch, tokens if bound else None)
    cluster = FakeCluster(spec, ledger, random, outcomes, chunks, death=random.choice([0, 0, 0.02, 0.2]))
    if random.random() < 0.5:
        cluster.admission.observe_kv_tokens(random.randint(1, 60))
    share = share_of(range(4))
    for step in range(STEPS):
        if random.random() < 0.3:
            share = share_of(sorted(random.sample(range(4), random.randint(1, 4))), random.randint(1, 2))
        num_filtered, num_failed = len(cluster.filtered), len(cluster.failed)
        cluster.run_step(STEPS - step, share)
        filtered, failed = len(cluster.filtered) - num_filtered, len(cluster.failed) - num_failed
        assert cluster.ledger.version == step + 1 and max(cluster.ledger.ages, default=0) <= bound
        if bound == 0:
            _check_synchronous(cluster, batch, filtered, failed, filters)
        _check_counts(cluster)
        if random.random() < 0.3:
            cluster.settle()
            cluster.restart()
    assert len(cluster.trained) == len(set(cluster.trained)) == cluster.ledger.ended["trained"]
    cluster.settle()
    _check_counts(cluster)


@pytest.mark.parametrize("deployment", ["hybrid", "separate"])
@pytest.mark.parametrize(("death", "minibatches"), [(0, 1), (0.02, 1), (0, 2)])
def test_in_the_tail_cards_that_train_accumulate_what_is_ready(deployment, death, minibatches):
    """At staleness 1 each step has a tail, as older groups must be trained first."""
    spec = spec_of(deployment, group_size=4, ahead=True, lends=True, engine_slots=40, minibatches=minibatches)
    cluster = FakeCluster(spec, StalenessLedger(1, 12), Random(0), ("ok",), death=death)
    for step in range(20):
        cluster.run_step(20 - step, share_of(range(4)))
        assert len(cluster.trained) == len({*cluster.trained}) == 12 * (step + 1)
        assert max(cluster.ledger.ages) <= 1
    assert cluster.num_accumulated > 12 and bool(cluster.lent_s) == (deployment == "hybrid")
    assert not death or cluster.num_deaths


def test_a_group_is_admitted_that_finds_room_for_some_of_its_requests():
    """An engine that decodes 2 requests at a time may have 3, so 4 engines have room for 12: 2.4 groups of 5."""
    admission = Admission(spec_of("separate", group_size=5, ahead=True), StalenessLedger(3, 8))
    admits = (command for command in admission.step(9, share_of(range(4))) if isinstance(command, AdmitGroups))
    assert next(admits) == AdmitGroups(3)


def _check_synchronous(cluster, batch, filtered, failed, filters):
    """At staleness 0 a step admits its batch, and what was filtered or failed of it while others were generated; all
    engines stop in it, so that it has their figures."""
    assert not cluster.engines
    assert cluster.num_suspended == 0 and cluster.ledger.num_untrained == 0
    assert batch <= cluster.num_admitted_in_step <= batch + filtered + failed
    if not filtered or not filters:
        assert cluster.num_admitted_in_step == batch, "nothing is made up for"


def _check_counts(cluster):
    cluster.note_cancelled()  # also groups whose last request came back with a stopped engine
    ended = len(cluster.trained) + len(cluster.filtered) + len(cluster.failed)
    assert ended == sum(cluster.ledger.ended.values()), "each group ends once"
    assert ended + cluster.ledger.num_untrained == len(cluster.admitted), "and none is lost"
    on_engines = {id for ids in cluster.engines.values() for id in ids}
    running = {entry.id for entry in cluster.admission.buffer.of("running")}
    away = {entry.id for entry in cluster.admission.buffer.of("away")}
    assert running | away == on_engines | {*cluster.arriving} | cluster.away
    assert cluster.away <= away and not away & on_engines
    assert cluster.admission.running.total == sum(map(cluster.admission.buffer.num_running_on, cluster.engines))


@pytest.mark.parametrize("filtered", [3, 4])
def test_a_step_makes_up_for_filtered_groups_up_to_a_limit(filtered):
    spec, ledger = spec_of("colocated", group_size=1, max_filtered_groups=3), StalenessLedger(0, 2)
    admission, left = Admission(spec, ledger), filtered
    for command in admission.step(1, share_of(range(4))):
        match command:
            case AdmitGroups(count):
                number = sum(ledger.ended.values()) + ledger.num_untrained
                admission.observe_admitted({f"g{number + k}": 1 for k in range(count)})
            case AwaitSamples():
                entry = admission.buffer.of("running")[0]
                admission.observe_generated({entry.id: 5})
                if left:
                    left -= 1
                    admission.observe_filtered(entry.group, "no_signal")
                else:
                    admission.observe_scored(entry.group, 6)
            case Train(groups):
                assert len(groups) == (2 if filtered == 3 else 1), "no more than three are made up for"
                admission.observe_trained(groups)


@pytest.mark.parametrize("slots", [1, 100])
@given(st.randoms(use_true_random=False))
def test_at_staleness_0_what_is_dispatched_does_not_depend_on_which_response_ends_first(slots, random):
    """An epoch ends within a step, so that two groups of a row are in it, of other lengths."""

    def dispatched(shuffle):
        spec = spec_of("colocated", group_size=2, order="history", engine_slots=slots, num_rows=5, filters=False)
        ledger, commands, admitted = StalenessLedger(0, 7), [], 0
        admission = Admission(spec, ledger)
        for step in range(4):
            running = []
            for command in admission.step(4 - step, share_of(range(4))):
                match command:
                    case AdmitGroups(count):
                        numbers = range(admitted, admitted + count)
                        admission.observe_admitted({f"e{number // 5}-{number % 5}": 1 for number in numbers})
                        admitted += count
                    case Dispatch(requests):
                        commands.append({engine: list(columns.ids) for engine, columns in requests.items()})
                        running += [id for ids in commands[-1].values() for id in ids]
                    case AwaitSamples():
                        shuffle(running)
                        id = running.pop()
                        admission.observe_generated({id: 1 + sum(map(ord, id)) * 37 % 50})
                        group = id.split("/")[0]
                        if not any(one.startswith(f"{group}/") for one in running):
                            admission.observe_scored(group, 6)
                    case Train(groups):
                        admission.observe_trained(groups)
        return commands

    assert dispatched(random.shuffle) == dispatched(lambda ids: ids.sort())


def test_engines_that_share_no_card_with_the_trainer_take_new_weights_while_they_run():
    random = _Always(0.9)
    cluster = FakeCluster(spec_of("hybrid", ahead=True), StalenessLedger(1, 4), random, ("ok",))
    published = []
    execute = cluster.execute
    cluster.execute = lambda command: (
        published.append(command) if isinstance(command, Publish) else None,
        execute(command),
    )
    finish = _finish_all(cluster)
    cluster.run_step(9, share_of(range(4)), finish)
    cluster.run_step(8, share_of(range(4)), finish)
    cluster.run_step(7, share_of(range(4), max_seqs=2), finish)
    cluster.run_step(6, share_of((0, 1)), finish)
    assert [(one.version, one.overlapped) for one in published] == [(0, ()), (1, (2, 3)), (2, ()), (3, ())]
    synchronous = Admission(spec_of("hybrid"), StalenessLedger(0, 4))
    assert [command for command, _ in zip(synchronous.step(1, share_of(range(4))), range(1), strict=False)] == [
        Publish(0)
    ]


def _finish_all(cluster):
    def finish():
        for requests in cluster.engines.values():
            for id in list(requests)[:2]:
                requests.remove(id)
                cluster.generated[id] = 5
                cluster.arriving.append(id)
        cluster.arrive(1.1)
        cluster.score()

    return finish


class _Always:
    """In place of a random generator, so that nothing ends by itself."""

    def __init__(self, value):
        self._value = value

    def random(self):
        return self._value

    def randint(self, least, most):
        return least

    def choice(self, options):
        return options[0]


def test_groups_admitted_while_a_smaller_step_trains_leave_the_next_version_to_be_published():
    """The place of a group that failed after the engines had stopped ends with the version."""
    ledger = StalenessLedger(1, 2)
    ledger.admit(["a", "b", "c", "d"])
    ledger.finish("a", 1)
    ledger.fail("b", "reward_raised")
    ledger.finish("c", 1)
    ledger.begin_training(1)
    assert ledger.may_admit == 0, "c and d need both places of the next version"
    ledger.train(["a"])
    assert ledger.may_advance


def test_a_last_step_that_lacks_tokens_is_trained_as_it_is():
    """Filtered groups cannot be made up for where the run has no steps left for more."""
    ledger = StalenessLedger(1, 4, 30)
    admission = Admission(spec_of("colocated", group_size=1, ahead=True), ledger)
    ledger.admit(["a", "b", "c"])
    ledger.finish("a", 15)
    ledger.finish("b", 14)
    ledger.finish("c", 40)
    admission.observe_filtered("c", "no_signal")
    commands = []
    for command in admission.step(1, share_of(range(4))):
        commands.append(command)
        assert len(commands) < 20, "it is collected for ever"
        if isinstance(command, AdmitGroups):
            raise AssertionError("for which step?")
        if isinstance(command, Suspend):
            for engine in command.engines:
                admission.observe_stopped(engine, [])
    assert commands[-1] == Train(("a", "b"))


def test_what_an_observation_costs_does_not_grow_with_the_requests_under_way():
    small, large = _lines_per_event(64), _lines_per_event(1024)
    assert large < 2 * small, (small, large)


def _lines_per_event(batch):
    """Lines of pure code that run for one sample that is generated, and what is fed upon it; groups of 16."""
    spec = spec_of("separate", group_size=16, engine_slots=batch * 2, ahead=True)
    admission, lines = Admission(spec, StalenessLedger(1, batch)), 0
    files = {
        sys.modules[name].__file__
        for name in ("stalesync.policy.admission", "stalesync.policy.supply", "stalesync.policy.staleness")
    }
    files.add(sys.modules["fusion.rollout.buffer"].__file__)

    def count(frame, event, _):
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename in files
        return count if frame.f_code.co_filename in files else None

    for command in admission.step(9, share_of(range(4))):
        if isinstance(command, AdmitGroups):
            admission.observe_admitted({f"g{k}": 5 for k in range(command.count)})
        if isinstance(command, Dispatch):
            by_engine = command.requests_by_engine.values()
            ids = [id for ids in zip(*(requests.ids for requests in by_engine), strict=False) for id in ids]
        if isinstance(command, AwaitSamples):
            break
    assert len(ids) > batch * 10
    sys.settrace(count)
    try:
        for id in ids[:40]:
            admission.observe_generated({id: 5})
            assert not list(admission.feed()) and not admission.ledger.is_enough
    finally:
        sys.settrace(None)
    return lines / 40


def test_a_checkpoint_of_the_earlier_format_is_restored():
    """tests/stalesync/data/controller.json is of step 4 of a hybrid run of two cards, with suspended samples."""
    state = json.loads((Path(__file__).parents[1] / "data" / "controller.json").read_text())
    admission = Admission(spec_of("hybrid", group_size=4, ahead=True), StalenessLedger(1, 8))
    admission.load_state_dict(state)
    again = admission.state_dict()
    assert again["ledger"] == state["ledger"]
    kept = [{key: value for key, value in entry.items() if key != "suspensions"} for entry in state["buffer"]]
    assert again["buffer"] == [entry | {"step": 0} for entry in kept]
    assert {entry["group"] for entry in state["buffer"]} <= set(state["ledger"]["in_flight"])


def test_a_conversation_goes_back_to_an_engine_as_soon_as_its_environment_has_answered():
    """At staleness 0, without filters: the engine stays while the conversation is away."""
    spec = spec_of("colocated", group_size=1, filters=False, turns=True, num_engines=1, engine_slots=8)
    admission, events = Admission(spec, StalenessLedger(0, 12)), []
    for command in admission.step(1, share_of(range(1))):
        match command:
            case AdmitGroups(count):
                admission.observe_admitted({f"g{number}": 1 for number in range(count)})
            case Dispatch(requests):
                assert not command.last
                (columns,) = requests.values()
                events.append([*zip(columns.ids, columns.earlier, columns.observations, strict=True)])
            case AwaitSamples() if len(events) == 1:
                admission.observe_chunks_ended(0, [SuspendedSample("g0/0", 4, "g0/0~4", (0, 0), 0, turn=True)])
                admission.observe_returned("g0/0", 3)
            case AwaitSamples() if admission.buffer.num("running") == 12:
                (suspended,) = events[-1]
                assert suspended == ("g0/0", "g0/0~4", 3)
                admission.observe_chunks_ended(0, [SuspendedSample("g0/0", 9, "g0/0~9", (0, 0), 0, turn=True)])
                admission.observe_generated({f"g{number}/0": 5 for number in range(1, 12)})
            case AwaitSamples():
                assert list(admission.running) == [0] and not admission.running.total
                assert admission.buffer.num("away") == 1, "it is waited for"
                admission.observe_generated({"g0/0": 9})
                for number in range(12):
                    admission.observe_scored(f"g{number}", 6)
            case Suspend(engines):
                events.append(engines)
            case Train(groups):
                assert len(groups) == 12 and events[-1] == (0,) and len(events) == 3
                admission.observe_trained(groups)


def test_a_cancelled_group_fails_when_its_last_request_has_come_back():
    spec = spec_of("colocated", group_size=4, turns=True, num_engines=1, engine_slots=3)
    admission = Admission(spec, StalenessLedger(0, 1))
    for command in admission.step(1, share_of(range(1))):
        match command:
            case AdmitGroups():
                admission.observe_admitted({"g": 1})
            case AwaitSamples():
                turns = [SuspendedSample(f"g/{member}", 4, f"g/{member}~4", (0, 0), turn=True) for member in (0, 1)]
                admission.observe_chunks_ended(0, turns)
                admission.observe_returned("g/1", 3)
                admission.observe_cancelled("g", "env_timeout")
                assert admission.buffer.take_left_rows() == ["g/0~4", "g/1~4"] and not admission.ledger.ended
                admission.observe_chunks_ended(0, [SuspendedSample("g/2", 4, "g/2~4", (0, 0), turn=True)])
                assert admission.buffer.take_left_rows() == ["g/2~4"] and "g/0" in admission.buffer.entries
                admission.observe_generated({"g/3": 7})
                assert dict(admission.ledger.ended) == {"failed:env_timeout": 1}
                assert not admission.buffer.entries
            case Train(groups):
                assert not groups
                admission.observe_trained(groups)
