"""The guarded process: reads samples, scores them one after the other, answers each as soon as it is done.

Imports the standard library only, plus what the chosen reward needs, so that a replacement is ready in a fraction of a
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
    """Entry of a child; the options are those that `process.start_child` writes."""
    options = json.loads(options_json)
    die_with_parent(options["life_fd"])
    # Both write from C, so they also speak for code that holds the interpreter (a regular expression gone wild, a
    # crash).
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
    """Has the kernel kill this process group when the other end of the pipe closes, which only the pool's process
    holds.

    A watching thread could be locked out by the code it watches, and a parent-death signal follows the *thread* that
    started the child, not the process.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)  # type: ignore[attr-defined]
    gone, _, _ = select.select([life_fd], [], [], 0)
    if gone:
        os._exit(1)


def load(kind: str, path: str | None) -> Callable[..., float]:
    """The reward function in force; raises `ValueError` naming the key for what the user got wrong."""
    if kind == "custom":
        from fusion.rewards.user import load_user_function

        assert path is not None
        return load_user_function(path)
    if kind == "math":
        try:
            import math_verify  # noqa: F401  (its import takes time that no sample should be charged for)
        except ImportError as error:
            raise ValueError(f"reward.name='math' needs the package math-verify: {error}") from error
        from fusion.rewards.math import math_answer

        return math_answer
    from fusion.rewards.arithmetic import arithmetic

    return arithmetic


def serve(connection: socket.socket, function: Callable[..., float]) -> None:
    requests = connection.makefile("rb")
    while header := requests.read(HEADER.size):
        index, size = HEADER.unpack(header)
        started = time.perf_counter()
        reward, error, detail, key = score(function, requests.read(size))
        connection.sendall(pack(index, (reward, error, detail, key, time.perf_counter() - started)))


def score(function: Callable[..., float], payload: bytes) -> tuple[float | None, str | None, str, str]:
    """(reward, error, detail, key); errors with the same key are one and the same to a reader."""
    try:
        prompt, response, answer, fields = pickle.loads(payload)
        value = function(prompt, response, answer, **{k: v for k, v in fields.items() if k not in RESERVED})
    except BaseException as error:  # a user's sys.exit() costs its sample too
        frame = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
        return None, "raised", traceback.format_exc()[-DETAIL_CHARS:], key
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value), None, "", ""
    shown = f"returned {value!r:.200} ({type(value).__name__}); expected a finite number"
    return None, "bad_type", shown, type(value).__name__
