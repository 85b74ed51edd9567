"""Run the guarded process: read samples, score them one by one, return each result as soon as it is available. A reward
that scores a batch gets all samples of a frame in one call.

Imports only the standard library and what the selected reward needs, so that a replacement starts in a fraction of a
second."""

import faulthandler
import json
import os
import pickle
import re
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from fusion.rewards.keeper import children, end_descendants, run_kept
from fusion.rewards.outcome import finite
from fusion.rewards.wire import HEADER, SPLIT, START, LoadedReward, Result, ScoringStarted, pack_reply

T = TypeVar("T")
DETAIL_CHARS, SHOWN_CHARS = 8000, 200
MEMORY = "memory"
"""Error of a sample that has reached the limit of memory, and key of a `SPLIT` that has: the process ends after it"""
RESERVE_BYTES = 64 << 20
"""Memory beyond the limit in which a sample that has reached it is reported"""


def main(options_json: str) -> None:
    """Run a child with the options that `process.Child` writes."""
    options, connection = open_child(options_json)
    pid, memory_mib = os.getpid(), options["memory_mib"]
    limit = memory_limit(memory_mib, "reward.memory_mib")
    reward, error = attempt(lambda: load(options["kind"], options["target"]), options["label"], limit)
    end_if_forked(pid)
    asked = ([], False, []) if reward is None else ([*reward.required_fields], reward.scores_batch, [*reward.asks])
    started = ScoringStarted(error, *asked)
    try:
        connection.sendall(pack_reply(START, started))
    except ConnectionError:  # the pool has been closed meanwhile
        return
    if reward is not None:
        serve(connection, reward, memory_mib=memory_mib)


def open_child(options_json: str) -> tuple[dict[str, Any], socket.socket]:
    """Put this process under its keeper and its limit of memory, and have its stack written on request. Return the
    options and the connection to the pool."""
    options = json.loads(options_json)
    run_kept(options["life_fd"], child_fds=(options["socket_fd"], options["trace_fd"]))
    # Both write from C, so they also report code that blocks the interpreter (a runaway regular expression, a crash).
    faulthandler.enable(file=options["trace_fd"])
    faulthandler.register(signal.SIGUSR1, file=options["trace_fd"], all_threads=False)
    limit_memory(options["memory_mib"])
    return options, socket.socket(fileno=options["socket_fd"])


def attempt(load: Callable[[], T], label: str, limit: str) -> tuple[T | None, str]:
    """Return what ``load`` returns and "", or None and why it failed, for the user."""
    try:
        return load(), ""
    except ValueError as invalid:
        return None, str(invalid)[:DETAIL_CHARS]
    except MemoryError:
        raise_memory_limit()
        return None, f"{label}: loading it exceeded the {limit}\n{trace_of_exception()}"
    except BaseException:
        return None, f"{label}: loading it raised\n{trace_of_exception()}"


def limit_memory(mib: int | None) -> None:
    """Bound the private memory of this process, and of each that it starts; an allocation beyond raises MemoryError.

    `RLIMIT_DATA` counts what can be written, so that address space which libraries only reserve is free."""
    if mib is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20
    ceiling = limit + RESERVE_BYTES
    if hard != resource.RLIM_INFINITY:
        limit, ceiling = min(limit, hard), min(ceiling, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, ceiling))


def raise_memory_limit() -> None:
    """Give this process the memory in which it reports that it reached its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def memory_limit(mib: int | None, key: str) -> str:
    return f"memory limit of {mib} MiB ({key})"


def end_if_forked(pid: int) -> None:
    """End this process if it is a copy that the reward has forked: only the process ``pid`` replies to the pool."""
    if os.getpid() != pid:
        os._exit(0)


def load(kind: str, target: str | None) -> LoadedReward:
    """Load the reward function of a `RewardSpec`.
    Raise ValueError: the user's function or a required package cannot be loaded (names the config key)."""
    assert target is not None
    if kind == "custom":
        from fusion.rewards.user import load_user_function

        return load_user_function(target)
    if kind == "format":
        pattern = re.compile(target, re.DOTALL)  # a dot matches line ends, too
        return LoadedReward(without_fields(lambda _, response, __: float(pattern.fullmatch(response) is not None)))
    module, _, name = target.partition(":")
    try:
        return LoadedReward(without_fields(getattr(import_module(module), name)))
    except ImportError as error:
        raise ValueError(f"reward.name={kind!r} needs a package that is not installed: {error}") from error


def without_fields(function: Callable[..., float]) -> Callable[..., float]:
    """Return the function without the fields of the row, whose names may be those of its arguments."""

    def call(prompt: str, response: str, answer: str, /, **fields: object) -> float:
        return function(prompt, response, answer)

    return call


def serve(connection: socket.socket, reward: LoadedReward, *, memory_mib: int | None) -> None:
    """Score samples from the socket until it closes. After each call, end the processes that it has started; those
    started when the reward was loaded stay."""
    requests, pid, own = connection.makefile("rb"), os.getpid(), children()
    while header := requests.read(HEADER.size):
        index, size = HEADER.unpack(header)
        started = time.perf_counter()
        payload = requests.read(size)
        if reward.scores_batch:
            results = score_batch(reward.score, pickle.loads(payload), memory_mib=memory_mib)
        else:
            results = [(index, score(reward.score, payload, memory_mib=memory_mib))]
        end_if_forked(pid)
        end_descendants(spared=own)
        seconds = (time.perf_counter() - started) / len(results)
        replies = [pack_reply(number, Result(*result[:-1], seconds=seconds)) for number, result in results]
        connection.sendall(b"".join(replies))
        if any(MEMORY in (result.error, result.key) for _, result in results):
            os._exit(0)  # what has filled the memory may still be referenced


def score(function: Callable[..., Any], payload: bytes, *, memory_mib: int | None = None) -> Result:
    try:
        prompt, response, answer, fields = pickle.loads(payload)
        return result_of(function(prompt, response, answer, **fields))
    except BaseException as error:  # including a user's sys.exit()
        return failure_of(error, memory_mib)


def score_batch(
    function: Callable[..., Any], samples: Sequence[tuple[int, bytes]], *, memory_mib: int | None = None
) -> list[tuple[int, Result]]:
    """Score the samples (index, payload) of one call; returns index and result of each. If the call fails and has
    several samples, it is unknown which caused that: returns one result, `SPLIT`, with the index of the first. A value
    that is no list of as many items is a failure of all of them, as scoring each alone would hide it."""
    indices = [index for index, _ in samples]
    try:
        prompts, responses, answers, rows = zip(*(pickle.loads(payload) for _, payload in samples), strict=True)
        names = dict.fromkeys(name for fields in rows for name in fields)
        columns = {name: [fields.get(name) for fields in rows] for name in names}
        value = function([*prompts], [*responses], [*answers], **columns)
        items = items_of(value)
    except BaseException as error:
        failed = failure_of(error, memory_mib)
        several = Result(None, SPLIT, "", failed.error if failed.error == MEMORY else "")
        return [(indices[0], failed if len(samples) == 1 else several)]
    if items is None or len(items) != len(samples):
        kind = type(value).__name__
        number = kind if items is None else f"{kind} of {len(items)}"
        returned = f"returned {shown(value)} ({number}) for {len(samples)} samples"
        detail = f"{returned}; expected a list of one number for each"
        return [(index, Result(None, "bad_type", detail, kind)) for index in indices]
    return [(index, result_of(item)) for index, item in zip(indices, items, strict=True)]


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple, array or tensor; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [*value] if isinstance(value, (list, tuple)) else None


def result_of(value: object) -> Result:
    """Return the result of a sample for which the reward has returned a value: a number, also as a scalar of numpy or
    torch, or a dict with `score`."""
    score = value.get("score") if isinstance(value, dict) else value
    if (reward := finite(score.tolist() if hasattr(score, "tolist") else score)) is not None:
        return Result(reward, None, "", "")
    kind = type(value).__name__
    detail = f"returned {shown(value)} ({kind}); expected a finite number of float32, or a dict that has one as score"
    return Result(None, "bad_type", detail, kind)


def failure_of(error: BaseException, memory_mib: int | None) -> Result:
    """Return the result of a sample for which the reward has raised; called where it is handled."""
    out_of_memory = isinstance(error, MemoryError) and memory_mib is not None
    if out_of_memory:
        raise_memory_limit()
    frame = traceback.extract_tb(error.__traceback__)[-1]
    key = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
    trace = trace_of_exception()
    if out_of_memory:
        return Result(None, MEMORY, f"exceeded the {memory_limit(memory_mib, 'reward.memory_mib')}\n{trace}", key)
    return Result(None, "raised", trace, key)


def trace_of_exception() -> str:
    return traceback.format_exc()[-DETAIL_CHARS:]


def shown(value: object) -> str:
    """Return the beginning of the value's representation, which for a long text is not computed as a whole."""
    return repr(value[:SHOWN_CHARS] if isinstance(value, (str, bytes)) else value)[:SHOWN_CHARS]
