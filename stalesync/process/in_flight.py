"""Calls whose answers are awaited later, while this process does something else."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")
Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
_idle: list[Calls] = []
"""Queues of the threads that wait for a call. Threads are kept, as to start one takes longer than most calls; there are
as many as calls were ever in flight at the same time."""

os.register_at_fork(after_in_child=_idle.clear)


def begin(call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
    """Call a function on another thread, which does not keep the process from ending. The future's `result` returns
    and raise what the function does."""
    future: Future[Result] = Future()
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        Thread(target=_serve, args=(calls,), name="in flight", daemon=True).start()
    calls.put((partial(call, *args, **kwargs), future))
    return future


def _serve(calls: Calls) -> None:
    while True:
        _execute(calls, *calls.get())


def _execute(calls: Calls, call: Callable[[], Any], future: Future[Any]) -> None:
    """Execute one call. The thread counts as idle before the caller can have the result: it begins the next."""
    try:
        result = call()
    except BaseException as error:
        _idle.append(calls)
        future.set_exception(error)
    else:
        _idle.append(calls)
        future.set_result(result)
