"""Encode and decode frames between the pool and its children: `<index, size>` and a payload, in both directions.

A frame has one sample, or, for a reward that scores a batch, the samples of one call, with the index of the first. A
result is that of one sample in either case.

Samples are pickled, because fields of a data row may have any type. What a child sends is only numbers and JSON, so
that the pool executes nothing that the process of a reward writes."""

import json
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fusion.rewards.outcome import ERRORS, usable

T = TypeVar("T")
HEADER = struct.Struct("<II")
START = 0xFFFFFFFF
"""Index of the frame that a child sends before any sample: a `ScoringStarted`."""
SPLIT = "split"
"""Error of a result that stands for a whole call of several samples, which failed: each is to be scored alone"""
MAX_REPLY_BYTES = 1 << 20
"""Bound above every message of a child"""
OTHERS = "other_responses"
"""Parameter of a user's function that receives the other responses of the sample's group"""
PREFILL = "prefill"
"""Parameter of a user's function that receives the end of the prompt that belongs to the response, such as `<think>`"""
OF_RUN = (OTHERS, PREFILL)
"""Parameters that receive what a run knows, not a field of the row"""
BATCH = ("prompts", "responses")
"""Names of the first two parameters of a user's function that scores a batch of samples in one call"""


@dataclass(frozen=True)
class LoadedReward:
    """A reward function and what it asks for.
    ``score``: called as `score(prompt, response, answer, **fields)`, with fields of the data row; of a batch as
    `score(prompts, responses, answers, **fields)`, with lists of equal length.
    ``required_fields``: fields of the row without which it cannot be called.
    ``scores_batch``: it scores a batch of samples in one call, and returns as many numbers.
    ``asks``: which of `OF_RUN` it must get among the fields."""

    score: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    scores_batch: bool = False
    asks: tuple[str, ...] = ()


class ScoringStarted(NamedTuple):
    """``error``: why the child cannot score, "" if it can; other fields as of `LoadedReward`."""

    error: str
    required_fields: list[str]
    scores_batch: bool = False
    asks: list[str] = []


class Result(NamedTuple):
    """A sample's `RewardOutcome`; errors with the same ``key`` are logged once."""

    reward: float | None
    error: str | None
    detail: str
    key: str
    seconds: float = 0.0


def pack_samples(samples: Iterable[tuple[int, Any]]) -> bytes:
    """Encode samples (index, picklable) for a child. Each is pickled by itself, so that one that cannot be loaded, or
    exceeds the memory, costs no other."""
    return b"".join([frame(index, pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)) for index, sample in samples])


def pack_call(samples: Sequence[tuple[int, Any]]) -> bytes:
    """Encode the samples (index, picklable) of one call for a child. Each is pickled by itself, as above."""
    call = [(index, pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)) for index, sample in samples]
    return frame(samples[0][0], pickle.dumps(call, pickle.HIGHEST_PROTOCOL))


def pack_reply(index: int, reply: ScoringStarted | Result) -> bytes:
    """Encode what a child sends."""
    return frame(index, json.dumps(reply).encode())


def take_frames(buffer: bytearray, decode: Callable[[int, bytes], T]) -> Iterator[tuple[int, T]]:
    """Remove the complete frames at the front of `buffer` and yield each as (index, decoded payload).
    Raise ValueError: a frame is too large, or not what ``decode`` accepts."""
    at = 0
    try:
        while len(buffer) - at >= HEADER.size:
            index, size = HEADER.unpack_from(buffer, at)
            if size > MAX_REPLY_BYTES:
                raise ValueError(f"a reply of {size} bytes")
            end = at + HEADER.size + size
            if len(buffer) < end:
                break
            start, at = at + HEADER.size, end
            yield index, decode(index, bytes(buffer[start:end]))
    finally:
        del buffer[:at]


def decode_list(payload: bytes, kind: str, length: int) -> list[Any]:
    """Return the JSON list of a ``kind`` of reply. Raise ValueError: the payload is not a JSON list of that length."""
    try:
        values = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"expected a {kind}")
    return values


def decode_reply(index: int, payload: bytes) -> ScoringStarted | Result:
    """Return what `pack_reply` has encoded. Raise ValueError: the payload is something else."""
    kind: type[ScoringStarted] | type[Result] = ScoringStarted if index == START else Result
    reply = kind(*decode_list(payload, kind.__name__, len(kind._fields)))
    if not (_is_started(reply) if isinstance(reply, ScoringStarted) else _is_result(reply)):
        raise ValueError(f"expected a {kind.__name__} with other values")
    return reply


def _is_started(reply: ScoringStarted) -> bool:
    lists = (reply.required_fields, reply.asks)
    named = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
    return isinstance(reply.error, str) and type(reply.scores_batch) is bool and named


def _is_result(reply: Result) -> bool:
    texts = all(isinstance(text, str) for text in (reply.detail, reply.key)) and type(reply.seconds) in (int, float)
    if reply.reward is None:
        return texts and reply.error in (*ERRORS, SPLIT)
    return texts and reply.error is None and type(reply.reward) is float and usable(reply.reward)


def frame(index: int, payload: bytes) -> bytes:
    """Return the payload behind its header."""
    return HEADER.pack(index, len(payload)) + payload
