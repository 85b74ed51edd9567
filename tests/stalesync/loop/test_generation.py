"""The controller's side of the engines, without any."""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from fusion.colocate import Deployment, InferenceShare
from fusion.inference.config import RolloutConfig
from fusion.inference.request import NO_REWARDS
from fusion.rollout import EvalAnswer, SuspendedSample
from fusion.rollout.detokenize import DetokenizerSpec
from stalesync.cards.stage_calls import EnginesLost, RunningStage
from stalesync.job.config import Config
from stalesync.loop.evaluator import Evaluator
from stalesync.loop.generation import Generation
from stalesync.policy.commands import Dispatch, DispatchedRequests, Publish
from stalesync.policy.reward_history import RewardHistory
from stalesync.process.failures import CardFailed
from stalesync.prompts import Prompt
from stalesync.prompts.lengths import ForcedLengths
from tests.rollouts import rollout_config


class Calls:
    """In place of the cards: notes what is begun."""

    timeout_s = 100.0

    def __init__(self):
        self.begun, self.stays, self.pending = [], {}, ()
        """Calls; `stay` by rank, and references, of the stages that `begin_each` begins"""
        self.chunks = {}
        """Answers of the calls that wait for ended chunks, by rank"""

    def begin_each(self, calls):
        (stage,) = {call.stage for call in calls.values()}
        self.begun.append((stage, {rank: [one.id for one in call.args[0]] for rank, call in calls.items()}))
        self.stays = {rank: call.kwargs.get("stay") for rank, call in calls.items()}
        return RunningStage(stage, tuple(calls), dict.fromkeys(self.pending, 0))

    def ask_each(self, calls):
        if calls:
            (stage,) = {call.stage for call in calls.values()}
            self.begun.append(
                (stage, {rank: [getattr(one, "id", one) for one in call.args[0]] for rank, call in calls.items()})
            )

    def on(self, ranks):
        return SimpleNamespace(**{name: partial(getattr(self, name), ranks) for name in ("ask", "begin")})

    def begin(self, ranks, stage, *args, **kwargs):
        self.begun.append((stage.__name__, list(ranks), *args, *kwargs))
        return RunningStage(stage.__name__, tuple(ranks), {})

    def wait(self, running):
        self.begun.append(("wait", running and running.ranks))
        return [SimpleNamespace(until_ns=9, suspended=[]), SimpleNamespace(until_ns=7, suspended=[])]

    def wait_all(self, stages):
        return [self.wait(stage) for stage in stages]

    def begin_asking(self, call, ranks, on_answer):
        self.begun.append((call.stage, list(ranks)))
        return dict.fromkeys(ranks)

    def take_answers(self, asked, timeout_s=0.0):
        answers = {rank: self.chunks.pop(rank, []) for rank in list(asked) if rank in self.chunks or timeout_s}
        for rank in answers:
            del asked[rank]
        return answers

    def check(self): ...

    def ask(self, ranks, request, *args):
        self.begun.append((request.__name__, list(ranks)))

    hosts = ()

    def find_unresponsive(self):
        return [1]


def _generation(**rollout):
    spec = SimpleNamespace(
        rollout=rollout_config(forced_median=4, **rollout),
        seed=0,
        turns=False,
        engines=[(0, 1), (2, 3)],
        world=4,
        deployment=Deployment((0, 1), (0, 1, 2, 3), (), ()),
        detokenizer=DetokenizerSpec("", end_token_ids=(1, 7)),
    )
    cards, prompts = Calls(), {"a": Prompt("a", (1, 2, 3), "", ""), "b": Prompt("b", (4,), "", "")}
    made = Generation(spec, cards, prompts, lambda reports: None)
    made.dispatch(Dispatch({0: _requests("a/0", "a/1"), 1: _requests("b/0")}, {}, frozenset({0, 1})))
    return made, cards


def _suspend(made, engines):
    made.pause(engines)
    return {engine: made.stop(engine) for engine in engines}


def _requests(*ids):
    count = len(ids)
    groups, zeros, nones = [id.split("/")[0] for id in ids], [0] * count, [None] * count
    return DispatchedRequests(ids, groups, [""] * count, nones, zeros, zeros, nones, zeros)


def test_requests_have_the_rewards_of_the_last_group_of_their_row():
    made, _ = _generation()
    assert {one.last_rewards for one in made._requests(_requests("a/0", "b/0"))} == {NO_REWARDS}
    made._rewards = history = RewardHistory()
    made._prompts |= {"e1-a": made._prompts["a"]}
    history.observe({"e0-a/0": 1.0, "e0-a/1": None})
    one, two, other = made._requests(_requests("e1-a/0", "e1-a/1", "b/0"))
    assert one.last_rewards == ("e0-a", (1.0, None)) and one.last_rewards is two.last_rewards
    assert other.last_rewards == NO_REWARDS


def test_an_engines_first_card_gets_its_requests_and_frees_kv_that_was_left():
    made, cards = _generation()
    assert cards.begun == [("generate", {0: ["a/0", "a/1"], 1: []}), ("generate", {2: ["b/0"], 3: []})]
    del cards.begun[:]
    resumed = DispatchedRequests(["b/1"], ["b"], ["b/1~2"], [1], [0], [0], [None], [0])
    made.dispatch(Dispatch({1: resumed}, {0: ["b/1"]}, frozenset()))
    assert cards.begun == [("submit", {2: ["b/1"]}), ("forget", {0: ["b/1"]})]
    (request,) = made._requests(resumed)
    assert (request.earlier, request.kv_rank, request.prompt) == ("b/1~2", 1, (4,))
    assert request.params.stop_token_ids == (1, 7), "the end tokens of the model and of its tokenizer"
    assert request.exact_tokens == ForcedLengths(0, 4, RolloutConfig().sampling_params().max_tokens)("b", 1)


def test_all_engines_are_asked_at_once_and_then_awaited():
    made, cards = _generation()
    del cards.begun[:]
    resumed = {0: _requests("b/1"), 1: _requests("a/2")}
    made.dispatch(Dispatch(resumed, {1: ["b/1"], 0: ["a/2"]}, frozenset()))
    assert cards.begun == [("submit", {0: ["b/1"], 2: ["a/2"]}), ("forget", {2: ["b/1"], 0: ["a/2"]})]
    del cards.begun[:]
    _suspend(made, (0, 1))
    assert cards.begun == [("pause", [0, 2]), ("wait", (0, 1)), ("wait", (2, 3))]


def test_one_call_waits_for_ended_chunks_on_the_first_card_of_each_engine():
    made, cards = _generation(chunk_tokens=2)
    del cards.begun[:]
    assert made.take_ended_chunks() == {} and cards.begun == [("await_ended_chunks", [0, 2])]
    first, second = SuspendedSample("a/0", 2, "a/0~2", (0, 0), 1), SuspendedSample("a/1", 2, "a/1~2", (0, 0), 0)
    cards.chunks = {0: [second, first], 1: ["of a card that is not asked"]}
    assert made.take_ended_chunks() == {0: [second, first]}
    assert made.take_ended_chunks() == {} and cards.begun[1:] == [("await_ended_chunks", [0])], "a new one each"


def test_what_a_call_returns_at_the_end_of_its_stage_is_suspended_with_the_rest():
    made, cards = _generation(chunk_tokens=2)
    made.take_ended_chunks()
    ended = SuspendedSample("b/0", 2, "b/0~2", (0, 0), 1)
    cards.chunks = {2: [ended]}
    assert _suspend(made, (1,)) == {1: [ended]}
    del cards.begun[:]
    assert made.take_ended_chunks() == {} and cards.begun == [], "engine 0 is asked already, 1 does not run"


def test_cards_are_not_asked_for_chunks_where_there_are_none():
    made, cards = _generation()
    cards.begin_asking = cards.take_answers = None
    assert made.take_ended_chunks() == {}


def test_new_weights_are_received_beside_by_engines_that_go_on():
    made, cards = _generation()
    share = InferenceShare((0, 1), 0.5, 4)
    del cards.begun[:]
    made.begin_publish(Publish(3, overlapped=(1,)), share)
    assert len(cards.begun) == 2 and made.publishing
    made.end_publish()
    assert not made.publishing
    assert cards.begun[:2] == [
        ("receive", [2, 3], 3, share),
        ("switch", [0, 1], "infer", 3, share, "while_generating"),
    ]
    assert cards.begun[2:] == [("wait", (0, 1)), ("wait", (2, 3))]
    assert [running.reported_until_ns for running in made._running.values()] == [7, 7]
    del cards.begun[:]
    made.begin_publish(Publish(4), share)
    assert cards.begun == [("switch", [0, 1, 2, 3], "infer", 4, share)] and made.publishing
    made.end_publish()
    assert cards.begun[1:] == [("wait", (0, 1, 2, 3))] and not made.publishing


def test_cards_that_train_switch_behind_the_stages_that_they_run():
    made, cards = _generation()
    share = InferenceShare((0, 1), 0.5, 4)
    del cards.begun[:]
    made.begin_switch_to_train(3, share)
    _suspend(made, (0, 1))
    made.switch_to_train(3, share)
    switch = ("switch", [0, 1], "train", 3, share)
    assert cards.begun == [switch, ("pause", [0, 2]), ("wait", (0, 1)), ("wait", (2, 3)), ("wait", (0, 1))]
    del cards.begun[:]
    made.switch_to_train(3, share)
    assert cards.begun == [switch, ("wait", (0, 1))], "where no engine has run"


@pytest.mark.parametrize("alone", [True, False])
def test_the_cards_switch_back_as_soon_as_no_card_would_wait(alone):
    """Behind an engine that has all cards that train, or when all engines have stopped by themselves."""
    made, cards = _generation()
    share = InferenceShare((0, 1), 0.5, 4)
    switch = ("switch", [0, 1], "train", 3, share)
    _suspend(made, (0, 1))
    assert cards.stays == {2: True, 3: True} and "pause" in dict(cards.begun[2:3])
    made.begin_return(3, share)
    assert not made.returning, "they stay until they are paused"

    cards.pending = ("ref",)
    requests = {0: _requests("a/0")} if alone else {0: _requests("a/0"), 1: _requests("b/0")}
    made.dispatch(Dispatch(requests, {}, frozenset(requests), last=True))
    assert not any(cards.stays.values())
    del cards.begun[:]
    made.begin_return(3, share)
    assert cards.begun == ([switch] if alone else [])
    for running in made._running.values():
        running.pending.clear()
    made.begin_return(3, share)
    assert cards.begun == [switch] and made.returning, "once"
    del cards.begun[:]
    _suspend(made, requests)
    made.switch_to_train(3, share)
    assert [call[0] for call in cards.begun] == ["wait"] * (len(requests) + 1), "no pause: it would meet a later stage"


def test_engines_that_are_silent_are_spoken_of_and_then_end_the_run(caplog):
    made, _ = _generation()
    held = {0: 2, 1: 1}.__getitem__
    made.check_silence(10.0, held)
    assert not caplog.messages
    for silent_s in (31.0, 40.0, 62.0, 0.5, 31.0):
        made.check_silence(silent_s, held)
    assert [message.split(": ")[0] for message in caplog.messages] == [
        "no sample has arrived for 31 s",
        "no sample has arrived for 62 s",
        "no sample has arrived for 31 s",
    ]
    with pytest.raises(
        CardFailed,
        match=r"for 101 s \(cluster.stage_timeout_s\): engine 0 \(ranks \[0, 1\]\) has 2 sam.*; rank 1 did not answer",
    ):
        made.check_silence(101.0, held)


class AnsweringCards:
    """Engines that answer, but for those that die: ``deaths``, of each round of calls. Also in place of what replaces
    them."""

    def __init__(self, deaths):
        self.deaths, self.asked, self.absent = deaths, [], set()

    def begin_each(self, calls):
        ids = {rank: [one.id for one in call.args[0]] for rank, call in calls.items()}
        stage = RunningStage("answer", tuple(calls), {})
        engine = min(calls) // 2
        self.asked.append((engine, sorted(sum(ids.values(), []))))
        stage.died = engine in self.deaths.get(len([one for one, _ in self.asked if one == engine]), ())
        stage.results = {rank: SimpleNamespace(answers=list(map(_answer, ids[rank]))) for rank in calls}
        return stage

    def wait(self, stage):
        if stage.died:
            self.absent.add(min(stage.ranks) // 2)
            raise EnginesLost
        return [stage.results[rank] for rank in stage.ranks]

    def replacing(self):
        return suppress(EnginesLost)


def _answer(id):
    return EvalAnswer(id, "", 1, "stop")


@pytest.mark.parametrize(
    ("deaths", "answered"), [({}, "abcde"), ({1: [1]}, "abcde"), ({1: [1], 2: [0]}, "ace"), ({1: [0, 1]}, "")]
)
def test_prompts_of_an_engine_that_dies_are_answered_by_those_that_live(deaths, answered):
    made, _ = _generation()
    made._cards, made._running = cards, _ = AnsweringCards(deaths), {}
    desk = SimpleNamespace(share=InferenceShare((0, 1), 0.5, 4))
    loop = SimpleNamespace(config=Config(), generation=made, engines=cards, desk=desk)
    evaluation = SimpleNamespace(config=SimpleNamespace(sampling={}))
    evaluator, answers = Evaluator(evaluation=evaluation, loop=loop), {}
    evaluator.answer(SimpleNamespace(pool=None), [Prompt(id, (1, 2), "", "") for id in "abcde"], answers)
    assert "".join(sorted(answers)) == answered
    asked = [id for _, ids in cards.asked for id in ids]
    lost = [id for engine, ids in cards.asked[:2] if engine in deaths.get(1, ()) for id in ids]
    again = lost if len(deaths.get(1, ())) == 1 else []
    assert sorted(asked) == sorted([*"abcde", *again])
    dead = set()
    for number, (engine, _) in enumerate(cards.asked):
        assert engine not in dead, "it has no weights"
        dead |= set(deaths.get(1, ())) if number == 1 else set()
