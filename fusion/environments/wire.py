"""Encode and decode frames between the pool and its children: `<number, size>` and a payload, in both directions.

The first order of a conversation to a child has all that is needed to repeat it, the next ones their action only.
Orders are pickled, because fields of a data row may have any type. What a child sends is JSON, and checked as what an
environment returns is."""

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fusion.environments.interface import (
    FAILURES,
    START_ROLES,
    EnvironmentFailed,
    Message,
    StepOrder,
    Stepped,
    Turn,
    checked_messages,
    checked_turn,
    digest_of,
)
from fusion.rewards.wire import MAX_REPLY_BYTES, START, decode_list, frame


class NextOrder(NamedTuple):
    """The next step of conversation `id`, whose environment is alive. `action`: text of the model's turn."""

    id: str
    action: str


class EndOrder(NamedTuple):
    """Close the environment of conversation `id`, if there is one."""

    id: str


Order = StepOrder | NextOrder | EndOrder


class Reply(NamedTuple):
    """Result of an order, as a `Stepped`."""

    failure: str | None
    detail: str
    seconds: float
    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def turn(self) -> Turn:
        return Turn(self.messages, self.done, self.reward)

    def stepped(self, id: str) -> Stepped:
        turn = None if self.failure else self.turn
        digest = "" if turn is None else digest_of(turn)
        return Stepped(id, turn, digest, self.failure, self.detail, self.seconds, self.tools)


def pack_order(number: int, order: Order) -> bytes:
    return frame(number, pickle.dumps(order, pickle.HIGHEST_PROTOCOL))


def pack_start(error: str) -> bytes:
    """Encode what a child sends first. ``error``: why it cannot serve, "" if it can."""
    return frame(START, json.dumps([error]).encode())


def pack_reply(number: int, reply: Reply) -> bytes:
    """Encode what a child sends; a reply that is too long as a failure."""
    payload = json.dumps(reply).encode()
    if len(payload) > MAX_REPLY_BYTES:
        failed = Reply("bad_turn", f"messages and tools of {len(payload):,} bytes as JSON", reply.seconds)
        payload = json.dumps(failed._replace(detail=f"{failed.detail}; expected at most {MAX_REPLY_BYTES:,}")).encode()
    return frame(number, payload)


def decode_reply(index: int, payload: bytes) -> Reply | str:
    """Return a child's reply, or the text of its start. Raise ValueError: the payload is something else."""
    if index == START:
        (error,) = decode_list(payload, "start", 1)
        if not isinstance(error, str):
            raise ValueError("expected a text")
        return error
    reply = Reply(*decode_list(payload, "Reply", len(Reply._fields)))
    valid = reply.failure in (None, *FAILURES) and isinstance(reply.detail, str) and type(reply.seconds) is float
    if not valid or not isinstance(reply.tools, list) or not all(isinstance(tool, dict) for tool in reply.tools):
        raise ValueError("expected a Reply with other values")
    try:
        if reply.failure is None:
            checked_turn(reply.turn, START_ROLES)
        elif checked_messages(reply.messages):
            raise ValueError("expected no messages of a failure")
    except EnvironmentFailed as failed:
        raise ValueError(failed.detail) from None
    return reply
