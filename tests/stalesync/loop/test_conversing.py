"""Conversations between real decisions, a real queue and a real buffer, and environments and cards that only note."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from distqueue import PackedBatch
from fusion.environments import Turn
from fusion.inference import Request
from fusion.rollout.partial_samples import PartialSamples
from fusion.rollout.types import EndedConversation, SuspendedSample, row_of
from fusion.telemetry import Metrics
from stalesync.loop.evaluated_turns import EvaluatedTurns
from stalesync.process.failures import EnvironmentsFailed
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from tests.stalesync.loop.conversing_world import SPEC, World


def test_an_observation_is_put_into_the_row_of_a_turn_which_is_dispatched_again():
    world = World()
    first, second, _ = world.ids
    row = world.turn(first, 4, "1+1")
    order = world.pool.begun[first]
    assert order.actions == ("1+1",) and order.observed == ("d0",) and order.task.prompt == world.group
    world.say(first)
    assert world.entry(first).state == "waiting" and world.entry(first).observation == 3
    assert world.queue.read([row], ["observation"])["observation"][0].tolist() == [9, 9, 9]
    (dispatch,) = world.admission.feed()
    assert list(dispatch.requests_by_engine[0].earlier) == [row]
    assert world.groups.prompts[world.group].ids == (1, 2, 3) and world.groups.prompts[world.group].messages


def test_a_conversation_that_is_done_is_completed_by_another_card_if_one_dies_meanwhile():
    world = World()
    first, second, third = world.ids
    world.living = []
    rows = [world.turn(first, 4), world.turn(second, 4)]
    world.say(first, done=True)
    world.say(second, done=True)
    assert not world.calls and world.conversing.num_completing == 2, "no engine lives"

    class Dying(list):
        def __contains__(self, rank):
            return rank == 1 and list.__contains__(self, rank)

    world.living = Dying([1, 2])
    done = PackedBatch.from_samples([first], {"response": [torch.arange(4)]}, groups=[world.group])
    asked = world.ask_each
    world.ask_each = lambda calls: (world.queue.put(done) if not world.calls else None, asked(calls))
    world.conversing.poll()
    assert world.calls == [(2, rows), (1, rows[1:])], "what the first one has put is not put again"
    assert rows[0] not in [*world.queue.holding("turn")], "the row of a finished sample is dropped"
    assert third not in world.pool.ended and {first, second} <= {*world.pool.ended}


def test_a_group_fails_when_its_members_have_come_back_and_not_before_a_completed_one_arrives():
    world = World()
    first, second, third = world.ids
    world.turn(first, 4)
    world.turn(second, 4)
    world.say(first, done=True)
    world.pool.answer(second, failure="raised", detail="broken")
    world.conversing.poll()
    assert [outcome.error for outcome in world.failures] == ["env_raised"] * len(world.ids), "all samples of its group"
    assert world.entry(second).state == "away", "the completed sample has not arrived"
    sample = Sample(first, world.groups.prompts[world.group], "", 3, 4)
    sample.outcome = SimpleNamespace(error=None, reward=1.0)
    world.queue.put(PackedBatch.from_samples([first], {"response": [torch.arange(4)]}, groups=[world.group]))
    world.groups.note([sample], [])
    world.conversing.poll()
    assert world.entry(second).state == "finished" and world.entry(third).state == "running" and not world.log
    world.turn(third, 5)
    assert third not in world.pool.begun and [one.id for one in world.lost] == [second, third]
    assert not world.log, "the sample that has arrived is not scored"
    world.groups.note([], [sample])
    world.conversing.poll()
    assert world.log == [(world.group, "failed:env_raised")] and world.group not in world.groups.prompts
    assert world.admission.ledger.ended == {"failed:env_raised": 1} and first not in world.queue.holding("response")
    assert [*world.queue.holding("turn")] == [row_of(first, 4)], "no other row than that which its card drops is left"
    records = world.conversing.records([first], Metrics())
    assert [message["role"] for message in records[first].messages] == ["assistant", "user"], "it is shown"
    assert (
        not any(id in world.conversing.conversations for id in world.ids) and not world.conversing.conversations.failed
    )


def test_a_conversation_whose_row_is_lost_ends_as_lost():
    world = World()
    first = world.ids[0]
    row = row_of(first, 4)
    world.queue.put(PackedBatch((row,), {}, ("",)))
    world.queue.lose([row], "damaged")
    world.admission.observe_chunks_ended(0, [SuspendedSample(first, 4, row, (0, 0), turn=True)])
    world.conversing.poll()
    assert first in [one.id for one in world.queue.lost(0)] and not world.pool.begun


def test_a_conversation_whose_row_is_lost_while_it_is_away_is_left_to_the_engine_that_resumes_it():
    world = World()
    first, second = world.ids[:2]
    lost, row = world.turn(first, 4), world.turn(second, 4)
    world.queue.lose([lost], "damaged")
    for id in (first, second):
        world.pool.answer(id, Turn([{"role": "user", "content": "xyz"}]))
    world.conversing.poll()
    assert [world.entry(id).state for id in (first, second)] == ["waiting"] * 2
    assert [*world.queue.holding("observation")] == [row], "the other one goes on"
    request = Request(first, (1, 2, 3), group=world.group, earlier=lost, turns=True, observation=3)
    assert not PartialSamples(world.queue, turns=True).restore([request])
    assert [one.id for one in world.queue.lost(0) if one.id == first]


def test_what_is_answered_in_a_pause_is_held_and_a_restored_conversation_is_asked_again():
    world = World()
    first = world.ids[0]
    world.turn(first, 4)
    world.pool.answer(first, Turn([{"role": "user", "content": "x"}]))
    world.conversing.pause()
    assert world.entry(first).state == "away"
    state = world.conversing.state_dict()
    other = World()
    other.conversing.conversations.take(other.ids)
    other.conversing.load_state_dict(state)
    other.turn(first, 4)
    order = other.pool.begun[first]
    assert order.actions == ("a",) and order.observed == ("d0",)
    world.conversing.poll()
    assert world.entry(first).state == "waiting"


def test_a_bridge_knows_of_earlier_thoughts_also_after_a_resume():
    """The bridge of this world compares what it is told with the turns' texts."""
    world = World()
    first = world.ids[0]
    for number, text in enumerate(["long thought", "a"], 1):
        world.turn(first, 4 * number, text)
        state = world.conversing.state_dict()
        world.say(first, "x")
        assert world.entry(first).state == "waiting"
        [*world.admission.feed()]
    other = World()
    other.conversing.conversations.take(other.ids)
    other.conversing.load_state_dict(state)
    other.turn(first, 8, "a")
    other.say(first)
    assert other.entry(first).state == "waiting" and other.conversing.conversations.of(first).had_thought


def test_rows_whose_environment_does_not_begin_are_replaced_and_recorded():
    world = World()
    world.pool.refused = {f"g{world.drawn}"}
    (prompt,) = world.conversing.next(1)
    assert prompt.id == f"g{world.drawn - 1}" and world.drawn >= 3
    assert world.log == [(f"g{world.drawn - 2}", "failed:env_raised")]


def test_a_beginning_that_is_too_long_or_refused_by_the_template_ends_the_run_by_key_or_is_replaced():
    world = World()
    for said, named in (("long", "66 tokens, more than data.max_prompt_length=64"), ("refused", "template refuses")):
        world.pool.first = {f"g{world.drawn}": said}
        with pytest.raises(EnvironmentsFailed, match=named):
            world.conversing.next(1)
    world.conversing._data.long_prompts = "skip"
    world.pool.first = {f"g{world.drawn}": "long"}
    (prompt,) = world.conversing.next(1)
    assert prompt.id == f"g{world.drawn - 1}" and len(prompt.ids) == 3 and not world.log


def test_a_held_out_conversation_that_begins_with_too_many_tokens_fails_alone():
    world = World()
    world.pool.first = {"a": "long", "b": "refused"}
    talk = EvaluatedTurns(world.conversing.environments, SPEC, [Prompt(id, (0,), id, "") for id in "abc"])
    assert [prompt.id for prompt in talk.prompts] == ["c"] and talk.answers.keys() == talk.outcomes.keys() == {"a", "b"}
    assert talk.outcomes["a"].error == talk.outcomes["b"].error == "env_bad_turn"
    assert "data.max_prompt_length=64" in talk.outcomes["a"].detail


def test_messages_that_the_template_refuses_are_a_failure_of_their_environment():
    world = World(replace(SPEC, retries=1))
    for id in world.ids:
        world.turn(id, 4)
    world.say(world.ids[0], "refused")
    assert world.pool.ended == [world.ids[0]] and world.ids[0] in world.pool.begun, "a fresh environment is asked again"
    world.say(world.ids[0], "refused")
    world.conversing.poll()
    assert world.log == [(world.group, "failed:env_bad_turn")]
    assert "template refuses" in world.failures[0].detail


def test_a_conversation_that_the_template_rewrites_goes_on_behind_another_prompt_and_its_row_is_completed():
    world = World()
    first = world.ids[0]
    row, ended = world.turn(first, 4), []
    world.ask_each = lambda calls: ended.extend(call.args[0] for call in calls.values())
    world.conversing.environments.bridge.rewrites = True
    world.say(first)
    entry = world.entry(first)
    assert ended == [[EndedConversation(row, world.group, (1, 2, 3), continues=True)]]
    assert (entry.state, entry.name, entry.prompt_tokens, entry.max_tokens) == ("waiting", f"{first}.1", 5, 16)
    (dispatch,) = world.admission.feed()
    sent = dispatch.requests_by_engine[0]
    assert (sent.ids, sent.earlier, sent.observations) == ([f"{first}.1"], [""], [0])
    assert world.conversing.conversations.branch_of(first) == ([1, 2, 3, 8, 8], 16)
    again = World()
    again.conversing.conversations.take(again.ids)
    again.conversing.load_state_dict(json.loads(json.dumps(world.conversing.state_dict())))
    assert again.conversing.conversations.branch_of(first) == ([1, 2, 3, 8, 8], 16)

    world.turn(f"{first}.1", 4)
    assert world.pool.begun[first].actions == ("a", "a"), "its environment goes on"
    ended.clear()
    world.say(first, done=True)
    (((last,)),) = ended
    assert last == EndedConversation(row_of(f"{first}.1", 4), world.group, (1, 2, 3, 8, 8))
    arrived = Sample(first, world.groups.prompts[world.group], "last", 3, 4, oldest=5, newest=6)
    arrived.add_branches(world.conversing.environments.of(first))
    assert (arrived.row_tokens, arrived.response_tokens, arrived.rows) == ((7, 9), 8, [first, f"{first}.1"])
    assert (arrived.oldest, arrived.newest) == (0, 6) and arrived.response == "a\nxyz\nlast"


def test_a_group_that_fails_leaves_no_row_of_a_branch():
    world = World()
    first, second, third = world.ids
    row = world.turn(first, 4)
    world.living = []
    world.conversing.environments.bridge.rewrites = True
    world.say(first)
    world.turn(second, 4)
    world.pool.answer(second, failure="raised")
    world.conversing.poll()
    assert world.entry(first).state == "waiting", "its branch is not completed: no engine lives"

    def complete(calls):
        done = PackedBatch.from_samples([first], {"response": [torch.arange(4)]}, groups=[world.group])
        world.queue.put(done)
        world.queue.drop([row], "resumed")

    world.living, world.ask_each = [1], complete
    world.conversing.poll()
    world.conversing.poll()
    world.turn(third, 4)
    assert [world.entry(id).state for id in world.ids if id in world.admission.buffer.entries] == []
    assert not [*world.queue.holding("response")] and not [*world.queue.holding("turn")]
    assert world.log == [(world.group, "failed:env_raised")]
