"""Calls whose answers are awaited later, while this process does something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def begin(call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
    """Calls a function on a thread of its own, which does not keep the process from ending. The future's `result`
    returns and raises what the function does."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=f"in flight: {call.__name__}", daemon=True).start()
    return future
