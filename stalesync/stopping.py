"""End a run by a signal as by Ctrl-C: a readable run folder, and no process left.

SIGTERM is a scheduler's request to end, SIGHUP the end of the terminal. Each is raised in the main thread as `Stopped`,
a KeyboardInterrupt; the exit status of the process is then 128 + its number, as a shell reports it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by one of STOP_SIGNALS."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


def describe_stop(stop: KeyboardInterrupt) -> str:
    """Returns how the run ended, for its report."""
    return f"stopped by {stop.signal.name}" if isinstance(stop, Stopped) else "stopped by Ctrl-C"


def exit_status(stop: KeyboardInterrupt) -> int:
    """Returns the exit status of a process that ends by a signal."""
    return 128 + (stop.signal if isinstance(stop, Stopped) else signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raises `Stopped` in the block for STOP_SIGNALS. One that the parent process ignores, as `nohup` does with SIGHUP,
    stays ignored."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, _stop)
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # not one that C code has set
                signal.signal(number, handler)


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restores the handlers of STOP_SIGNALS at the end of the block, in which Ray replaces that of SIGTERM, in Python
    and then in C++ by one that ends the process. In the main thread, a signal that arrives meanwhile waits for the end
    of the block; one that another thread receives is passed to the former handler."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    in_main = threading.current_thread() is threading.main_thread()
    with _waiting() if in_main else nullcontext():
        try:
            yield
        except SystemExit as end:
            handler = handlers[signal.SIGTERM]
            if end.code == signal.SIGTERM and callable(handler):
                handler(signal.SIGTERM, None)
            raise
        finally:
            if in_main:
                for number, handler in handlers.items():
                    if handler is not None:  # not one that C code has set
                        signal.signal(number, handler)


@contextmanager
def _waiting() -> Iterator[None]:
    """Blocks STOP_SIGNALS in this thread and those it starts, but not in processes that it forks."""
    global _forked_mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _forked_mask = before
    try:
        yield
    finally:
        _forked_mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_forked_mask: Collection[int] | None = None
"""The mask of signals of processes that are forked now; None: that of the thread that forks"""


def _unblock_in_child() -> None:
    if _forked_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forked_mask)


os.register_at_fork(after_in_child=_unblock_in_child)


def _stop(number: int, _: object) -> NoReturn:
    raise Stopped(number)
