"""Decide how conversations continue: budgets, deadlines, retries, and which groups end as an environment failed. Pure.

    a turn ends ─ observe_turn ─► StepEnvironment ─► pool ─ observe_stepped ─┬─► Append     the model speaks again
                                   ▲                                         ├─► Branch     behind another prompt
                                   │                                         ├─► Complete   done, or a budget is used up
                                   └───────────────────── retried ───────────┼── failed
                                                                             └─► FailGroup  no retry left, or too late

A conversation is a request whose response also holds what its environment said. Its budgets are `max_turns` of the
model, `max_tokens` of the response over everything, and `episode_timeout_s` of its environments, over all attempts.
Seconds are observations: those that a step took, and those that the caller says have passed.

Where the chat template would rewrite a turn of the model, no tokens continue the conversation. It goes on in another
branch, whose prompt is all of it as the template writes it now. What was sampled before is trained as it was sampled,
and what the prompt repeats of it is not. Budgets are of the whole conversation: a branch may have as many tokens as the
others have left, and fewer if its prompt is longer than the first prompt and their responses.

Members of a failed group that an engine has end when they come back to the caller (`failed`): at most one turn later.

A restored state has nothing away. The caller observes a turn again that was away, with the same action, and gets the
same `StepEnvironment`: the environment is created again and replays `actions`; one that answers otherwise fails as
`diverged`.

Cost: O(log n) for an event of n conversations; O(n) for a state.

Invariants (property-tested in tests/stalesync/policy/test_conversations.py):
1. A conversation ends once: completed, finished by its engine, or as a member of a failed group.
2. A failure is never a reward: a conversation whose environment failed is stepped again or its group fails, and no
   member of a failed group is completed.
3. Nothing waits for ever: what is away for longer than is left of its seconds is failed by `observe_elapsed`.
4. No budget is exceeded: of turns, of tokens with at least one left for the model's next turn, and of retries.
5. A restored state continues as the one that was saved."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from hashlib import sha256
from heapq import heappop, heappush
from typing import Any, Literal

from fusion.environments import Stepped
from fusion.environments.render import TurnEnd

DIVERGED, TIMEOUT, BAD_TURN = "diverged", "timeout", "bad_turn"
"""Kinds of failure that are decided here, or not retried"""
Message = dict[str, Any]


@dataclass(frozen=True)
class ConversationSpec:
    """Budgets of a conversation. ``max_tokens``: of its response, observations included; ``retries``: number of
    environments that replace failed ones; ``sums_rewards``: whether its reward is the sum of those of its turns, else
    the last one; ``needs_reward``: whether it must have one when it is done."""

    max_turns: int
    max_tokens: int
    episode_timeout_s: float
    retries: int
    sums_rewards: bool = False
    needs_reward: bool = False


@dataclass(slots=True)
class Conversation:
    """One conversation. ``actions``: texts of the model's turns that were passed to its environment, of which the last
    is not answered while it is away; ``observed``: digests of what it has said, first messages included; ``messages``:
    all behind the first ones, for records; ``rewards``: of its turns; ``tokens``: of the response when its last turn
    ended; ``observation_tokens``: number of tokens from the environment; ``end``: of the last turn, and
    ``had_thought``: whether one before it has a thought, for the bridge; ``attempts``: number of times that an
    environment has failed, ``failure``: why it did last; ``seconds``: spent by environments; ``span``: policy versions
    of its oldest and newest token when its last turn ended. In several branches, ``tokens`` and ``prompt`` (token ids;
    [] for the first) are the current one's; ``row_tokens``: of prompt and response of each of the others,
    ``response_tokens``: of all their responses; ``used``: of the budget of tokens when the current one began;
    ``begins``: index in ``messages`` behind which each but the first speaks."""

    id: str
    group: str
    observed: list[str]
    actions: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: int = 0
    observation_tokens: int = 0
    end: TurnEnd = (0, False)
    had_thought: bool = False
    attempts: int = 0
    failure: str = ""
    seconds: float = 0.0
    span: Sequence[int] = (0, 0)
    prompt: Sequence[int] = ()
    row_tokens: list[int] = field(default_factory=list)
    response_tokens: int = 0
    used: int = 0
    begins: list[int] = field(default_factory=list)
    state: Literal["speaking", "away", "completing", "failed"] = "speaking"

    @property
    def num_turns(self) -> int:
        """Number of the model's turns that have ended."""
        return len(self.actions)

    @property
    def num_tool_calls(self) -> int:
        """Number of results of tools."""
        return sum(message["role"] == "tool" for message in self.messages)

    def text(self, response: str) -> str:
        """Return the text of the whole conversation: what each message says, then ``response``, of the last branch."""
        before = self.messages[: self.begins[-1]] if self.begins else []
        return "\n".join([*(message["content"] for message in before), response])


@dataclass(frozen=True)
class StepEnvironment:
    """Pass the last action of a conversation to its environment: answered by `observe_stepped`."""

    id: str


@dataclass(frozen=True)
class Append:
    """Append ``tokens``, the observation, to a conversation: the model speaks again."""

    id: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class Branch:
    """End the branch of a conversation with the tokens that it has, and have the model speak behind ``prompt``, at most
    ``max_tokens``. ``ended``: the prompt of the branch that ends; (): the first one's."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    ended: Sequence[int]


@dataclass(frozen=True)
class Complete:
    """Finish a conversation with the tokens that it has. ``cut``: a budget has ended it, not its environment."""

    id: str
    cut: bool


@dataclass(frozen=True)
class FailGroup:
    """End the conversations of a group, as one of its environments has failed: those that no engine has at once, the
    others when they come back. ``away``: those whose environments are awaited."""

    group: str
    away: tuple[str, ...]
    kind: str
    detail: str


Command = StepEnvironment | Append | Branch | Complete | FailGroup


def seed_of(run_seed: int, group: str) -> int:
    """Return the seed of the environments of a group: its members start from the same state."""
    return int.from_bytes(sha256(f"{run_seed}/{group}".encode()).digest()[:4], "big")


class Conversations:
    """Track the conversations of all groups from their admission until `take`."""

    def __init__(self, spec: ConversationSpec) -> None:
        self._spec = spec
        self._by_id: dict[str, Conversation] = {}
        self._members: dict[str, list[Conversation]] = {}
        """Conversations by group"""
        self.failed: dict[str, FailGroup] = {}
        """Groups whose members end, until `take`"""
        self._elapsed_s = 0.0
        self._due: dict[str, float] = {}
        """Conversation that is away → value of `_elapsed_s` from which on it is late"""
        self._deadlines: list[tuple[float, str]] = []
        """Heap of these, and of others that are not valid any more"""
        self._num_retries = 0
        """Environments that replaced another one since `take_num_retries`"""

    def admit(self, group: str, ids: Iterable[str], digest: str) -> None:
        """Add the conversations of a group. ``digest``: of the first messages of its environment."""
        for id in ids:
            self._add(Conversation(id, group, [digest]))

    def of(self, id: str) -> Conversation:
        """Return a conversation, which the caller does not change."""
        return self._by_id[id]

    def branch_of(self, id: str) -> tuple[Sequence[int], int]:
        """Return prompt and maximum of tokens of a conversation's current branch, which is not its first."""
        one = self._by_id[id]
        return one.prompt, self._spec.max_tokens - one.used

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def reward_of(self, id: str) -> float:
        """Return the reward of the turns of a conversation so far; 0 where its environment has given none, as where
        its first turn was cut."""
        rewards = self._by_id[id].rewards
        return 0.0 if not rewards else sum(rewards) if self._spec.sums_rewards else rewards[-1]

    def observe_turn(
        self, id: str, tokens: int, action: str, end: TurnEnd = (0, False), span: Sequence[int] = (0, 0)
    ) -> StepEnvironment | FailGroup | None:
        """Record that a turn of the model has ended; None: of a failed group. ``tokens``, ``span``: of the response so
        far; ``action``, ``end``: text and end of the turn, the same as before where it is observed again."""
        one = self._by_id[id]
        if one.state == "failed":
            return None
        assert one.state == "speaking", f"conversation {id!r} is {one.state}"
        assert one.num_turns < self._spec.max_turns, f"conversation {id!r} has used its turns up"
        one.actions.append(action)
        one.messages.append({"role": "assistant", "content": action})
        one.tokens, one.end, one.state = tokens, end, "away"
        one.span = span if not one.row_tokens else (min(one.span[0], span[0]), max(one.span[1], span[1]))
        if one.seconds >= self._spec.episode_timeout_s:
            return self._fail(one, *self._too_late(one))
        self._due[id] = self._elapsed_s + self._spec.episode_timeout_s - one.seconds
        heappush(self._deadlines, (self._due[id], id))
        return StepEnvironment(id)

    def observe_stepped(
        self,
        stepped: Stepped,
        observation: Sequence[int] | None = None,
        *,
        prompt: Sequence[int] = (),
        first_prompt_tokens: int = 0,
        had_thought: bool = False,
    ) -> Command | None:
        """Record the answer to a `StepEnvironment`; None: it comes too late. ``observation``: tokens of its messages,
        up to where the model speaks again; None: it cannot; ``prompt``: then those of all messages, in which there is a
        thought if ``had_thought``; of a conversation that began with ``first_prompt_tokens``."""
        one = self._by_id.get(stepped.id)
        if one is None or one.state != "away":
            return None
        one.seconds += stepped.seconds
        turn, spec = stepped.turn, self._spec
        if turn is None:
            return self._observe_failed(one, stepped.failure or BAD_TURN, stepped.detail)
        if turn.done and spec.needs_reward and turn.reward is None and not one.rewards:
            return self._observe_failed(one, BAD_TURN, "it is done and gave no reward (reward.name=environment)")
        del self._due[one.id]
        if turn.reward is not None:
            one.rewards.append(float(turn.reward))
        one.observed.append(stepped.digest)
        one.messages += map(dict, turn.messages)
        used = one.used + one.tokens + len(observation or ())
        if observation is None:
            used = max(used, len(prompt) - first_prompt_tokens)
        if turn.done or one.num_turns >= spec.max_turns or used >= spec.max_tokens:
            one.state = "completing"
            return Complete(one.id, cut=not turn.done)
        one.state = "speaking"
        if observation is None:
            one.had_thought = had_thought
            return self._branch(one, prompt, used, first_prompt_tokens)
        one.had_thought |= one.end[1]
        one.observation_tokens += len(observation)
        return Append(one.id, observation)

    def observe_elapsed(self, seconds: float) -> list[FailGroup]:
        """Record that time has passed while environments were awaited; return the groups that fail as one is late."""
        self._elapsed_s += seconds
        failed = []
        while self._deadlines and self._deadlines[0][0] <= self._elapsed_s:
            deadline, id = heappop(self._deadlines)
            if self._due.get(id) == deadline:
                failed.append(self._fail(self._by_id[id], *self._too_late(self._by_id[id])))
        return failed

    def take(self, ids: Collection[str]) -> list[Conversation]:
        """Remove conversations of ended groups, and return them."""
        taken = [self._by_id.pop(id) for id in ids if id in self._by_id]
        for group in {conversation.group for conversation in taken}:
            self._members.pop(group, None)
            self.failed.pop(group, None)
        return taken

    def take_num_retries(self) -> int:
        """Return the number of environments that replaced another one since the last call."""
        count, self._num_retries = self._num_retries, 0
        return count

    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain JSON, without the conversations of failed groups, which have ended. One that is away is stored
        as before its turn, which is observed again; a completed one has arrived as a sample."""
        saved = []
        for one in self._by_id.values():
            # Not `asdict`, which copies each token of a prompt.
            state = {item.name: copy(getattr(one, item.name)) for item in fields(one)}
            if one.state == "away":
                state["state"] = "speaking"
                del state["actions"][-1], state["messages"][-1]
            if one.state != "failed":
                saved.append(state)
        return saved

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        for values in state:
            self._add(Conversation(**values))

    def _add(self, one: Conversation) -> None:
        self._by_id[one.id] = one
        self._members.setdefault(one.group, []).append(one)

    def _branch(self, one: Conversation, prompt: Sequence[int], used: int, first_prompt_tokens: int) -> Branch:
        assert prompt, f"conversation {one.id!r} goes on behind no prompt"
        command = Branch(one.id, prompt, self._spec.max_tokens - used, ended=one.prompt)
        one.row_tokens.append((len(one.prompt) or first_prompt_tokens) + one.tokens)
        one.response_tokens += one.tokens
        one.begins.append(len(one.messages))
        one.prompt, one.used, one.tokens = prompt, used, 0
        return command

    def _observe_failed(self, one: Conversation, kind: str, detail: str) -> StepEnvironment | FailGroup:
        why = f"{detail}{one.failure}" if kind == DIVERGED else detail
        one.attempts, one.failure = one.attempts + 1, f"; before, it had failed ({kind}): {detail}"
        if one.seconds >= self._spec.episode_timeout_s:
            return self._fail(one, *self._too_late(one))
        if kind == DIVERGED or one.attempts > self._spec.retries:
            return self._fail(one, kind, why)
        self._num_retries += 1
        return StepEnvironment(one.id)

    def _too_late(self, one: Conversation) -> tuple[str, str]:
        limit = f"environment.episode_timeout_s={self._spec.episode_timeout_s:g}"
        return TIMEOUT, f"its environment took longer than {limit} by turn {one.num_turns}{one.failure}"

    def _fail(self, failing: Conversation, kind: str, detail: str) -> FailGroup:
        members = self._members[failing.group]
        away = tuple(member.id for member in members if member.state == "away")
        for one in members:
            self._due.pop(one.id, None)
            if one.state in ("speaking", "away"):
                one.state = "failed"
        failed = self.failed[failing.group] = FailGroup(failing.group, away, kind, detail)
        return failed
