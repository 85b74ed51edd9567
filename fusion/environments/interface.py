"""Define what an environment is, and what its pool is asked and answers. Plain data.

Invariants (tests/environments/test_interface.py): equal digests mean equal messages, end and reward; a turn that
`checked_turn` accepts is the same after JSON."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusion.rewards.outcome import finite

Message = Mapping[str, Any]
"""A chat message: `role` and `content`, both texts; of the model also `tool_calls`, a list of `tool_calls.ToolCall`"""
FAILURES = ("raised", "timeout", "died", "memory", "bad_turn", "diverged")
"""`raised`; `timeout` (`environment.step_timeout_s` or `episode_timeout_s`); `died` (its process ended); `memory` (it
exceeded `environment.memory_mib`); `bad_turn` (it returned no `Turn`, or no messages); `diverged` (after a reset with
the same seed and the same actions it said something else)"""
ROLES = ("system", "user", "tool")
"""Roles of an environment's messages"""
START_ROLES = (*ROLES, "developer", "assistant")
"""Roles of its first messages, which may be a conversation so far, as a row of the data may"""
FIELDS = {"role", "content", "name", "tool_call_id"}
"""Fields of an environment's messages"""


class EnvironmentFailed(Exception):
    """A failure that is not the model's: the conversation is retried and never trained. An environment may raise it
    as any other exception; ``kind``: one of FAILURES."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        assert kind in FAILURES, kind
        self.kind, self.detail = kind, str(detail)


@dataclass(frozen=True)
class Task:
    """What a conversation is about: a row of the data (picklable). `prompt`: a text or a chat."""

    prompt: str | list[dict[str, Any]]
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a chat."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True)
class Turn:
    """What the environment says after a turn of the model. `done`: the conversation has ended, and `messages` are not
    read by the model. `reward`: a finite number, or None for none at this turn."""

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One conversation's environment, created without arguments. Its methods share an event loop with hundreds of
    others, so they never block: they await.

    The messages depend only on task, seed and the model's turns. An attribute `tools`, JSON schemas of functions, is
    given to the chat template together with the first messages; each of the model's messages has then its calls in
    `tool_calls` (`tool_calls.parse`)."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin; return the messages that the model reads first, also turns of the assistant, which are not trained."""

    async def step(self, message: Message) -> Turn:
        """Return what follows the model's ``message``."""

    async def close(self) -> None:
        """Release what the environment holds."""


@dataclass(frozen=True)
class StepOrder:
    """The next step of conversation `id`. `actions`: texts of all of the model's turns, the last one is the step;
    `observed`: digests of what preceded each, from the first messages on. Without any it asks for the first messages,
    and nothing stays open."""

    id: str
    task: Task
    seed: int
    actions: Sequence[str] = ()
    observed: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert len(self.actions) == len(self.observed), f"{self.id}: an observation precedes each action"


@dataclass(frozen=True)
class Stepped:
    """Result of a `StepOrder`: `turn` and its `digest`, or a `failure`, one of FAILURES, and its `detail`. `seconds`
    of the environment's wall time were spent on it. `tools`: JSON schemas for the chat template, of the beginning."""

    id: str
    turn: Turn | None
    digest: str = ""
    failure: str | None = None
    detail: str = ""
    seconds: float = 0.0
    tools: Sequence[Mapping[str, Any]] = ()


def digest_of(turn: Turn) -> str:
    text = json.dumps([[*turn.messages], turn.done, turn.reward], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checked_messages(messages: Any, roles: Collection[str] = ROLES) -> list[dict[str, str]]:
    """Return the messages of an environment as plain dicts.
    Raise EnvironmentFailed: `bad_turn`: they are something else, no valid Unicode, or end with the assistant."""
    if not isinstance(messages, (list, tuple)):
        raise EnvironmentFailed("bad_turn", f"messages are a {type(messages).__name__}; expected a list")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() <= FIELDS:
            expected = "a mapping with role and content, and nothing else but name and tool_call_id"
            raise EnvironmentFailed("bad_turn", f"message {number} is {message!r:.80}; expected {expected}")
        if message["role"] not in roles or not all(isinstance(text, str) for text in message.values()):
            shown = f"message {number}, of role {message['role']!r:.40}"
            raise EnvironmentFailed("bad_turn", f"{shown}: expected a role of {', '.join(roles)}, and texts")
        try:
            "".join(message.values()).encode()
        except UnicodeEncodeError as error:
            raise EnvironmentFailed("bad_turn", f"message {number} is not valid Unicode: {error}") from None
    if messages and messages[-1]["role"] == "assistant":
        raise EnvironmentFailed("bad_turn", "the last message is the assistant's; expected what the model answers")
    return [dict(message) for message in messages]


def checked_start(messages: Any, tools: Any) -> tuple[Turn, list[dict[str, Any]]]:
    """Return the first messages of an environment, and the schemas of its tools, as plain values.
    Raise EnvironmentFailed: `bad_turn`: there are no messages, or either is something else."""
    if not (checked := checked_messages(messages, START_ROLES)):
        raise EnvironmentFailed("bad_turn", "reset returned no messages")
    try:
        schemas = json.loads(json.dumps(tools))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed("bad_turn", f"tools are no JSON: {error}") from None
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise EnvironmentFailed("bad_turn", f"tools are {tools!r:.40}; expected a list of JSON schemas")
    return Turn(checked), schemas


def checked_turn(turn: Any, roles: Collection[str] = ROLES) -> Turn:
    """Return the turn of an environment with plain values.
    Raise EnvironmentFailed: `bad_turn`: it is something else, has no messages though it is not done, or its reward is
    no finite number of float32."""
    if not isinstance(turn, Turn):
        raise EnvironmentFailed("bad_turn", f"returned a {type(turn).__name__}; expected a Turn")
    if not isinstance(turn.done, bool):
        raise EnvironmentFailed("bad_turn", f"done={turn.done!r:.40}: expected True or False")
    messages = checked_messages(turn.messages, roles)
    if not messages and not turn.done:
        raise EnvironmentFailed("bad_turn", "returned a Turn without messages that is not done")
    reward = None if turn.reward is None else finite(turn.reward)
    if reward is None and turn.reward is not None:
        raise EnvironmentFailed("bad_turn", f"reward={turn.reward!r:.40}: expected a finite number of float32, or None")
    return Turn(messages, turn.done, reward)
