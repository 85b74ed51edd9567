"""The invariants of conversations, with environments that answer, fail, never answer and are interrupted at random."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.policy.conversations import (
    BAD_TURN,
    DIVERGED,
    TIMEOUT,
    Append,
    Branch,
    Complete,
    Conversations,
    ConversationSpec,
    FailGroup,
    StepEnvironment,
    seed_of,
)

FIRST = 5
"""Tokens of the prompt of the first branch"""
SPEC = ConversationSpec(max_turns=3, max_tokens=20, episode_timeout_s=10.0, retries=1)


def stepped(id, *, reward=None, done=False, messages=(), digest="d", failure=None, detail="", seconds=1.0):
    turn = None if failure else SimpleNamespace(messages=list(messages), done=done, reward=reward)
    return SimpleNamespace(id=id, turn=turn, digest=digest, failure=failure, detail=detail, seconds=seconds)


def conversing(spec=SPEC, members=2):
    conversations = Conversations(spec)
    conversations.admit("g", [f"g/{member}" for member in range(members)], "first")
    return conversations


@dataclass
class World:
    """Engines and environments that behave at random, and what has become of every conversation."""

    random: object
    spec: ConversationSpec
    conversations: Conversations
    tokens: Counter = field(default_factory=Counter)
    """Of the current branch"""
    used: Counter = field(default_factory=Counter)
    """Of the responses of the branches before it"""
    branches: dict = field(default_factory=dict)
    """Conversation → prompt and limit of its current branch, of those that are not in their first"""
    ended: dict = field(default_factory=dict)
    asked: dict = field(default_factory=dict)
    """Conversation that is away → what its environment was asked"""
    failures: Counter = field(default_factory=Counter)
    failed: set = field(default_factory=set)

    def run(self, ids):
        self.ids = ids
        speaking = [*ids]
        for _ in range(10_000):
            if not (speaking or self.asked):
                return
            if self.random.random() < 0.1:
                speaking += self.restored()
            if speaking and self.random.random() < 0.6:
                self.speak(speaking.pop(self.random.randrange(len(speaking))))
            elif self.asked and self.random.random() < 0.8:
                id = self.random.choice(sorted(self.asked))
                speaking += self.answer(id)
            else:
                for command in self.conversations.observe_elapsed(self.random.uniform(0, 4)):
                    self.fail(command)
            speaking = [id for id in speaking if id not in self.ended]
        raise AssertionError("a conversation waits for ever")

    def speak(self, id):
        conversation = self.conversations.of(id)
        _, limit = self.branches.get(id, ((), self.spec.max_tokens))
        self.tokens[id] += min(self.random.randint(1, 5), limit - self.tokens[id])
        if self.tokens[id] == limit:  # the engine finishes it
            self.end(id, "failed" if conversation.group in self.failed else "cut")
            return
        command = self.conversations.observe_turn(id, self.tokens[id], f"{id} says {self.tokens[id]}")
        if command is None:
            assert conversation.group in self.failed
            self.end(id, "failed")
        elif isinstance(command, FailGroup):
            self.fail(command)
        else:
            assert command == StepEnvironment(id) and conversation.num_turns <= self.spec.max_turns
            self.asked[id] = [*conversation.actions], [*conversation.observed]

    def answer(self, id):
        del self.asked[id]
        if self.random.random() < 0.2:
            self.failures[id] += 1
            kind = self.random.choice(["raised", "died", DIVERGED])
            command = self.conversations.observe_stepped(stepped(id, failure=kind, seconds=self.random.uniform(0, 3)))
        else:
            size, done = self.random.randint(1, 8), self.random.random() < 0.2
            answer = stepped(id, reward=1.0, done=done, digest=f"d{size}", seconds=self.random.uniform(0, 3))
            is_branched = self.random.random() < 0.3
            prompt = [7] * (FIRST + self.random.randint(-2, 12))
            command = self.conversations.observe_stepped(
                answer, None if is_branched else [0] * size, prompt=prompt, first_prompt_tokens=FIRST
            )
            if isinstance(command, Branch):
                self.branch(id, command, prompt)
            if isinstance(command, Append):
                self.tokens[id] += size
                assert self.tokens[id] < self.branches.get(id, ((), self.spec.max_tokens))[1]
                assert self.conversations.of(id).num_turns < self.spec.max_turns
        assert self.failures[id] <= self.spec.retries + 1
        if isinstance(command, FailGroup):
            self.fail(command)
        elif isinstance(command, Complete):
            assert self.conversations.of(id).group not in self.failed
            self.end(id, "completed")
        elif isinstance(command, StepEnvironment):
            self.asked[id] = [*self.conversations.of(id).actions], [*self.conversations.of(id).observed]
        return [id] if isinstance(command, Append | Branch) else []

    def branch(self, id, command, prompt):
        """Begin another branch: all of them have at most the tokens of one, and none is longer."""
        assert [*command.ended] == [*self.branches.get(id, ((), 0))[0]] and command.prompt == prompt
        self.used[id] += self.tokens[id]
        self.tokens[id] = 0
        self.branches[id] = prompt, command.max_tokens
        assert 0 < command.max_tokens <= self.spec.max_tokens - self.used[id]
        assert len(prompt) + command.max_tokens <= FIRST + self.spec.max_tokens
        one = self.conversations.of(id)
        assert self.conversations.branch_of(id) == (prompt, command.max_tokens)
        assert one.response_tokens == self.used[id] and one.num_turns < self.spec.max_turns
        assert len(one.row_tokens) == len(one.begins) and one.begins[-1] == len(one.messages)

    def fail(self, command):
        assert command.group not in self.failed
        self.failed.add(command.group)
        for id in command.away:
            self.asked.pop(id, None)
            self.end(id, "failed")

    def end(self, id, how):
        assert id not in self.ended, f"{id} has ended as {self.ended[id]}"
        self.ended[id] = how

    def restored(self):
        """Save and restore, while no conversation of a failed group goes on; what was away is observed again."""
        if any(self.conversations.of(id).group in self.failed for id in self.ids if id not in self.ended):
            return []
        state = json.loads(json.dumps(self.conversations.state_dict()))
        others, self.conversations = self.conversations, Conversations(self.spec)
        self.conversations.load_state_dict(state)
        for id, asked in self.asked.items():
            action = others.of(id).actions[-1]
            command = self.conversations.observe_turn(id, self.tokens[id], action)
            assert command == StepEnvironment(id)
            one = self.conversations.of(id)
            assert (one.actions, one.observed) == asked, "the environment is asked to replay something else"
        return []


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 3))
def test_every_conversation_ends_once_within_its_budgets_and_no_failure_is_a_reward(random, groups, members):
    spec = ConversationSpec(random.randint(1, 4), 30, episode_timeout_s=20.0, retries=random.randint(0, 2))
    world = World(random, spec, Conversations(spec))
    ids = []
    for group in range(groups):
        ids += (of_group := [f"{group}/{member}" for member in range(members)])
        world.conversations.admit(str(group), of_group, "first")
    world.run(ids)
    assert world.ended.keys() == {*ids}
    assert {id.split("/")[0] for id, how in world.ended.items() if how == "failed"} <= world.failed
    world.conversations.take(ids)
    assert not world.conversations.state_dict() and not world.conversations.failed


def test_a_state_with_branches_of_millions_of_tokens_costs_no_more_than_a_copy_of_them():
    conversations, prompt = conversing(replace(SPEC, max_tokens=1 << 30), members=1), list(range(3_000_000))
    conversations.observe_turn("g/0", 4, "a")
    branch = conversations.observe_stepped(stepped("g/0"), prompt=prompt, first_prompt_tokens=FIRST)
    assert isinstance(branch, Branch)
    began_s = time.process_time()
    (state,) = conversations.state_dict()
    assert time.process_time() - began_s < 0.5
    assert state["prompt"] == prompt


def test_an_environment_that_never_answers_fails_its_group_when_its_seconds_are_used_up():
    conversations = conversing()
    assert conversations.observe_turn("g/0", 4, "a") == StepEnvironment("g/0")
    assert conversations.observe_elapsed(4) == []
    assert conversations.observe_stepped(stepped("g/0", seconds=4), [0] * 1) == Append("g/0", [0] * 1)
    conversations.observe_elapsed(100)  # the model speaks
    assert conversations.observe_turn("g/0", 8, "b") == StepEnvironment("g/0")
    assert conversations.observe_elapsed(5.5) == [], "six seconds are left of ten"
    (failed,) = conversations.observe_elapsed(0.5)
    assert failed.kind == TIMEOUT and failed.away == ("g/0",) and "episode_timeout_s" in failed.detail
    assert conversations.observe_stepped(stepped("g/0", done=True)) is None, "its answer comes too late"
    assert conversations.observe_turn("g/1", 3, "c") is None, "its sibling ends when it comes back"


def test_an_environment_that_is_late_by_its_failures_says_why_it_failed():
    conversations = conversing()
    conversations.observe_turn("g/0", 4, "a")
    blocked = stepped("g/0", failure="timeout", detail="blocked in step", seconds=9)
    assert conversations.observe_stepped(blocked) == StepEnvironment("g/0")
    (failed,) = conversations.observe_elapsed(10)
    assert failed.kind == TIMEOUT and "episode_timeout_s=10" in failed.detail and "blocked in step" in failed.detail


def test_the_deadline_of_a_turn_that_was_answered_fails_no_later_turn():
    conversations = conversing()
    conversations.observe_turn("g/0", 4, "a")
    assert conversations.observe_stepped(stepped("g/0", seconds=1), [0] * 1) == Append("g/0", [0] * 1)
    conversations.observe_elapsed(8)
    conversations.observe_turn("g/0", 8, "b")
    assert conversations.observe_elapsed(3) == [], "the first turn would be late now, the second has six seconds left"
    assert len(conversations.observe_elapsed(6)) == 1


def test_a_failed_environment_is_replaced_as_often_as_allowed_and_one_that_diverged_is_not():
    conversations = conversing()
    conversations.observe_turn("g/0", 4, "a")
    assert conversations.observe_stepped(stepped("g/0", failure="died")) == StepEnvironment("g/0")
    assert conversations.take_num_retries() == 1 and not conversations.take_num_retries()
    failed = conversations.observe_stepped(stepped("g/0", failure="raised", detail="Traceback"))
    assert failed == FailGroup("g", ("g/0",), "raised", "Traceback") and conversations.failed == {"g": failed}
    conversations = conversing()
    conversations.observe_turn("g/0", 4, "a")
    conversations.observe_turn("g/1", 4, "a")
    failed = conversations.observe_stepped(stepped("g/1", failure=DIVERGED))
    assert failed.kind == DIVERGED and failed.away == ("g/0", "g/1")
    conversations = conversing()
    conversations.observe_turn("g/0", 4, "a")
    conversations.observe_stepped(stepped("g/0", failure="raised", detail="Traceback"))
    failed = conversations.observe_stepped(stepped("g/0", failure=DIVERGED, detail="other messages"))
    assert failed.kind == DIVERGED and "other messages" in failed.detail and "Traceback" in failed.detail


def test_rewards_are_the_last_or_the_sum_and_one_that_is_needed_and_missing_is_a_failure():
    for sums, reward in ((False, 2.0), (True, 3.0)):
        spec = ConversationSpec(3, 20, episode_timeout_s=10.0, retries=0, sums_rewards=sums, needs_reward=True)
        conversations = conversing(spec)
        assert conversations.reward_of("g/0") == 0.0
        conversations.observe_turn("g/0", 4, "a")
        conversations.observe_stepped(stepped("g/0", reward=1.0), [0] * 2)
        conversations.observe_turn("g/0", 8, "b")
        assert conversations.observe_stepped(stepped("g/0", reward=2.0, done=True)) == Complete("g/0", cut=False)
        assert conversations.reward_of("g/0") == reward
        conversations.observe_turn("g/1", 4, "a")
        assert conversations.observe_stepped(stepped("g/1", done=True)).kind == BAD_TURN


def test_an_observation_that_leaves_no_token_to_the_model_ends_the_conversation():
    conversations = conversing()
    conversations.observe_turn("g/0", 15, "a")
    assert conversations.observe_stepped(stepped("g/0"), [0] * 5) == Complete("g/0", cut=True)
    conversations.observe_turn("g/1", 15, "a")
    assert conversations.observe_stepped(stepped("g/1"), [0] * 4) == Append("g/1", [0] * 4)
    conversations.observe_turn("g/1", 19, "b")
    assert conversations.observe_stepped(stepped("g/1"), [0]) == Complete("g/1", cut=True), "no token is left"
    assert conversations.of("g/1").observation_tokens == 4 and conversations.of("g/0").observation_tokens == 0


def test_siblings_share_a_seed_that_depends_on_run_and_group():
    assert len({seed_of(run, group) for run in range(3) for group in ("a", "b")}) == 6 and seed_of(0, "a") >= 0


def test_a_conversation_that_is_rewritten_goes_on_in_a_branch_with_what_is_left_of_its_tokens():
    conversations = conversing()
    conversations.observe_turn("g/0", 6, "a", (2, True), span=(3, 4))
    says = [{"role": "user", "content": "b"}]
    command = conversations.observe_stepped(stepped("g/0", messages=says), None, prompt=[1] * 7, first_prompt_tokens=3)
    assert command == Branch("g/0", [1] * 7, 14, ended=()), "six of twenty are used, and the prompt has four more"
    one = conversations.of("g/0")
    assert (one.row_tokens, one.response_tokens, one.begins, one.had_thought) == ([9], 6, [2], False)
    assert one.text("c") == "a\nb\nc" and conversations.of("g/1").text("c") == "c"
    conversations.observe_turn("g/0", 2, "c", span=(4, 5))
    assert one.span == (3, 5), "the oldest token is the first branch's"
    command = conversations.observe_stepped(stepped("g/0", messages=says), None, prompt=[2] * 15, first_prompt_tokens=3)
    assert command == Branch("g/0", [2] * 15, 8, ended=[1] * 7), "the longer prompt leaves less than 8 tokens do"
    assert one.row_tokens == [9, 9] and one.num_turns == 2
    conversations.observe_turn("g/0", 8, "d")
    assert conversations.observe_stepped(stepped("g/0", done=True)) == Complete("g/0", cut=False)
    conversations.observe_turn("g/1", 6, "a")
    command = conversations.observe_stepped(stepped("g/1"), None, prompt=[1] * 23, first_prompt_tokens=3)
    assert command == Complete("g/1", cut=True), "the prompt of a branch leaves no token"
