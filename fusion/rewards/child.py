"""Run the guarded process: read samples, score them one by one, return each result as soon as it is available.

Imports only the standard library and what the selected reward needs, so that a replacement starts in a fraction of a
second.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import math
import numbers
import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable

from fusion.rewards.wire import HEADER, START, pack

RESERVED = ("prompt", "response", "answer")
DETAIL_CHARS = 8000


def main(options_json: str) -> None:
    """Run a child with the options that `process.start_child` writes."""
    options = json.loads(options_json)
    die_with_parent(options["life_fd"])
    # Both write from C, so they also report code that blocks the interpreter (a runaway regular expression, a crash).
    faulthandler.enable(file=options["trace_fd"])
    faulthandler.register(signal.SIGUSR1, file=options["trace_fd"], all_threads=False)
    connection = socket.socket(fileno=options["socket_fd"])
    try:
        function = load(options["kind"], options["path"])
    except ValueError as error:
        connection.sendall(pack(START, str(error)))
        return
    except BaseException:
        connection.sendall(pack(START, traceback.format_exc()))
        return
    connection.sendall(pack(START, None))
    serve(connection, function)


def die_with_parent(life_fd: int) -> None:
    """Make the kernel kill this process group when the other end of the pipe, held only by the pool's process, closes.

    A watchdog thread could be blocked by the code that it watches, and a parent-death signal follows the *thread* that
    started the child, not the process.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)  # type: ignore[attr-defined]
    closed, _, _ = select.select([life_fd], [], [], 0)
    if closed:
        os._exit(1)


def load(kind: str, path: str | None) -> Callable[..., float]:
    """Load the reward function.

    Raises:
        ValueError: the user's function or a required package cannot be loaded (names the config key).
    """
    if kind == "custom":
        from fusion.rewards.user import load_user_function

        assert path is not None
        return load_user_function(path)
    if kind == "math":
        try:
            import math_verify  # noqa: F401  (imported now, so that the time does not count against a sample's limit)
        except ImportError as error:
            raise ValueError(f"reward.name='math' needs the package math-verify: {error}") from error
        from fusion.rewards.math import math_answer

        return math_answer
    from fusion.rewards.arithmetic import arithmetic

    return arithmetic


def serve(connection: socket.socket, function: Callable[..., float]) -> None:
    """Score samples from the socket until it closes."""
    requests = connection.makefile("rb")
    while header := requests.read(HEADER.size):
        index, size = HEADER.unpack(header)
        started = time.perf_counter()
        reward, error, detail, key = score(function, requests.read(size))
        connection.sendall(pack(index, (reward, error, detail, key, time.perf_counter() - started)))


def score(function: Callable[..., float], payload: bytes) -> tuple[float | None, str | None, str, str]:
    """Score one sample; returns (reward, error, detail, key). Errors with the same key are logged once."""
    try:
        prompt, response, answer, fields = pickle.loads(payload)
        value = function(prompt, response, answer, **{k: v for k, v in fields.items() if k not in RESERVED})
    except BaseException as error:  # including a user's sys.exit()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
        return None, "raised", traceback.format_exc()[-DETAIL_CHARS:], key
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value), None, "", ""
    detail = f"returned {value!r:.200} ({type(value).__name__}); expected a finite number"
    return None, "bad_type", detail, type(value).__name__
