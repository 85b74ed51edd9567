"""End a run by a signal: a message, a readable run folder, and no process left, whenever the signal arrives.

SIGINT is Ctrl-C, SIGTERM a scheduler's request to end, SIGHUP the end of the terminal. The exit status of the process
is 128 + the signal's number, as a shell reports it.

    the process has …          a signal …
    begun                      ends it at once with a message: it has started nothing yet       `leave_at_stops`
    a run folder               is raised in the main thread, SIGTERM and SIGHUP as `Stopped`    `stoppable`
    begun to start Ray         waits for the end of that, or for `HOLD_S`                       `holding`
    steps to save              SIGTERM ends it behind the step under way and a checkpoint; a    `completing`
                               second signal, or another one, is raised
    received a signal          changes nothing for `FORCE_S`, then ends it at once
    stated how the run ended   changes nothing                                                  `ignore_stops`

Python drops an exception that a signal raises where no caller can receive it: in a destructor, in a callback of the
import system, in a callback from C. So a signal is raised again every `RAISE_AGAIN_S` until one has arrived where the
run ends by it (`acknowledging`). Whatever ends at once, the guard of Ray and the keepers of rewards end the rest."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Raised as `Stopped`"""
SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
WAKE = signal.SIGURG
"""The process sends it to itself to raise an exception in the main thread: without a handler, it does nothing"""
RAISE_AGAIN_S = 3.0
"""A signal that has not ended the run is raised again after this time"""
HOLD_S = 3.0
"""The start of Ray goes on for at most this time after a signal"""
FORCE_S = 2.0
"""A second signal within this time is the first one, which the terminal and a parent process both sent"""
SHOW_CURSOR = b"\x1b[?25h"
"""A view of the progress hides it"""
REQUESTED = b"SIGTERM: the step under way ends, then a checkpoint is saved; a second signal ends the run without it\n"
COMPLETED = "SIGTERM arrived when the last step had begun: the run was completed"
Phase = Literal["idle", "leave", "raise", "hold", "stopping", "ended"]


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by one of STOP_SIGNALS."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


@dataclass
class _Stops:
    """What a signal does now, and what has arrived."""

    phase: Phase
    held: KeyboardInterrupt | None = None
    """Signals that arrived in `holding`, not raised yet"""
    held_s: float = 0.0
    reader_fd: int = -1
    """Pipe, in `holding`, in which the interpreter writes the number of a signal when a thread receives it"""
    first: KeyboardInterrupt | None = None
    """Interrupt that was raised"""
    first_s: float = 0.0
    completes: bool = False
    """Whether the first SIGTERM is a request, which is not raised (`completing`)"""
    request: Stopped | None = None
    """The first SIGTERM, once it has arrived"""
    request_s: float = 0.0
    failure: BaseException | None = None
    """Failure of another thread; `WAKE` interrupts the main thread for it"""


_stops = _Stops("idle")


def describe_stop(stop: KeyboardInterrupt) -> str:
    """Return how the run ended, for its report."""
    return f"stopped by {stop.signal.name}" if isinstance(stop, Stopped) else "stopped by Ctrl-C"


def exit_status(stop: KeyboardInterrupt) -> int:
    return 128 + (stop.signal if isinstance(stop, Stopped) else signal.SIGINT)


def leave_at_stops() -> None:
    """From now on, a signal ends the process at once, with a message. One that the parent process ignores, as `nohup`
    does with SIGHUP, stays ignored."""
    _install()
    _stops.phase = "leave"


def ignore_stops() -> None:
    """From now on, a signal changes nothing: the run has ended, and its report says how. Outside `stoppable` also while
    the interpreter ends, when Python's handlers are not called any more."""
    inside = _stops.phase in ("raise", "stopping")
    _stops.phase = "ended"
    if not inside:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for SIGINT, `Stopped` for STOP_SIGNALS. One that the parent process
    ignores, as `nohup` does with SIGHUP, stays ignored."""
    global _stops
    outer, before = _stops, dict[signal.Signals, Any]()
    _stops = _Stops("raise")
    try:
        before |= _install() | {WAKE: signal.signal(WAKE, _interrupt)}
        yield
    finally:
        if _stops.phase == "ended" and outer.phase == "leave":
            outer.phase = "ended"
        _stops = outer
        for number, handler in before.items():
            if handler is not None:  # not one that C code has set
                signal.signal(number, handler)


@contextmanager
def acknowledging() -> Iterator[None]:
    """Surround the innermost block that ends the run when it is interrupted. Raise what a handler raised, which a
    call of Ray replaces by another exception, or the failure for which another thread has interrupted the block
    (`raise_in_main`)."""
    try:
        yield
    except KeyboardInterrupt as stop:
        failure, _stops.failure = _stops.failure, None
        if _stops.phase == "raise":
            _stops.phase, _stops.first_s = "stopping", _stops.first_s or time.monotonic()
        cause = failure if _stops.first is None else _stops.first
        if cause is None or cause is stop:
            raise
        raise cause from None


@contextmanager
def holding() -> Iterator[None]:
    """Raise a signal that arrives in the block at its end."""
    if (phase := _stops.phase) != "raise":
        yield
        return
    reader_fd, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    _stops.phase, _stops.reader_fd = "hold", reader_fd
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _stops.phase, _stops.reader_fd = phase, -1
        for fd in (reader_fd, tells):
            os.close(fd)
        stop, _stops.held = _stops.held, None
        if stop is not None:
            _raise(stop)


@contextmanager
def completing() -> Iterator[None]:
    """Let the block complete what it does at the first SIGTERM: it asks for `requested_stop`, and raises that when it
    has saved. Any other signal, and a SIGTERM that comes more than `FORCE_S` later, are raised in it. A request that
    the block has not raised, since it has come to its end, changes nothing."""
    _stops.completes = True
    try:
        yield
    finally:
        _stops.completes = False


def requested_stop() -> Stopped | None:
    """Return the SIGTERM that has arrived in `completing`."""
    return _stops.request


def notes_of_request() -> list[str]:
    """Return a note for the report of a run that has come to its end although it received a SIGTERM."""
    return [] if _stops.request is None else [COMPLETED]


def held_too_long() -> KeyboardInterrupt | None:
    """Return the signal that has waited for `HOLD_S` for the end of `holding` or `keeping_handlers`. Called by a
    thread that was started inside the block, again and again."""
    if _stops.held is None and (arrived := (signal.sigpending() | _told()) & {*SIGNALS}):
        _stops.held_s, _stops.held = time.monotonic(), exception_of(min(arrived))
    return _stops.held if _stops.held and time.monotonic() - _stops.held_s > HOLD_S else None


def _told() -> set[int]:
    """Return the numbers of signals that any thread has received, also where the main thread waits in C."""
    try:
        return {*os.read(_stops.reader_fd, 64)} if _stops.reader_fd >= 0 else set()
    except BlockingIOError:
        return set()


def raise_in_main(failure: BaseException) -> None:
    """Interrupt the main thread, also where it waits, if it is inside `stoppable` and has not been interrupted
    before; `acknowledging` raises the failure. Any other thread."""
    if _stops.phase == "raise" and _stops.first is None:
        _stops.failure = failure
        _send_to_main(WAKE)


def leave(stop: KeyboardInterrupt) -> NoReturn:
    """End the process at once with a message. Any thread."""
    if os.isatty(1):
        os.write(1, SHOW_CURSOR)
    os.write(2, f"{describe_stop(stop)}\n".encode())
    os._exit(exit_status(stop))


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the handlers of STOP_SIGNALS at the end of the block, in which Ray replaces that of SIGTERM, in Python
    and then in C++ by one that ends the process. In the main thread, a signal that arrives meanwhile waits for the end
    of the block; one that another thread receives is passed to the former handler."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    in_main = threading.current_thread() is threading.main_thread()
    with holding() if in_main else nullcontext(), blocking_signals() if in_main else nullcontext():
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
def restoring_handlers() -> Iterator[Callable[[], None]]:
    """Restore the handlers of STOP_SIGNALS at the end of the block, in which Ray's C++ gives SIGTERM its default
    effect, of which Python learns nothing. In the main thread, one that would be raised waits for the end of the block;
    where the run ends by a signal already, a second one still ends it at once. Yield what restores them inside the
    block, as soon as the C++ is done: a signal that this thread blocks is received by another one, and by default it
    would end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    waiting, arrived = STOP_SIGNALS if _stops.phase == "raise" else (), list[int]()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)

    def restore(waits: bool = True) -> None:
        for number, handler in handlers.items():
            if handler is not None:  # not one that C code has set
                holds = waits and number in waiting and callable(handler)
                signal.signal(number, (lambda number, _: arrived.append(number)) if holds else handler)

    try:
        restore()
        yield restore
    finally:
        restore(waits=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in arrived[:1]:
            signal.raise_signal(number)


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Block signals in this thread and for good in those it starts, but not in processes that it forks."""
    global _forked_mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
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


def _install() -> dict[signal.Signals, Any]:
    """Handle all signals that the parent process does not ignore; return the handlers before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, _handle)
    return before


def _handle(number: int, _: object) -> None:
    """Handle a signal, in the main thread."""
    stop = exception_of(number)
    match _stops.phase:
        case "leave":
            leave(stop)
        case "hold":
            if _stops.held is None:
                _stops.held_s, _stops.held = time.monotonic(), stop
        case "raise":
            if not (isinstance(stop, Stopped) and _is_request(stop)):
                _raise(stop)
        case "stopping":
            if time.monotonic() - _stops.first_s > FORCE_S:
                leave(_stops.first or stop)


def _is_request(stop: Stopped) -> bool:
    """Return whether a signal asks to complete what is under way: the first SIGTERM in `completing`, and those that
    come with it."""
    if not _stops.completes or stop.signal != signal.SIGTERM:
        return False
    if _stops.request is None:
        _stops.request, _stops.request_s = stop, time.monotonic()
        os.write(2, REQUESTED)
    return time.monotonic() - _stops.request_s <= FORCE_S


def exception_of(number: int) -> KeyboardInterrupt:
    """Return what is raised for a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)


def _raise(stop: KeyboardInterrupt) -> NoReturn:
    if _stops.first is None:
        _stops.first, _stops.first_s = stop, time.monotonic()
        again = threading.Thread(target=_raise_again, args=(_stops, stop), name="raise again", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # only the main thread is to receive them
        again.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise stop


def _raise_again(stops: _Stops, stop: KeyboardInterrupt) -> None:
    while _stops is stops and stops.phase == "raise":
        time.sleep(RAISE_AGAIN_S)
        if _stops is stops and stops.phase == "raise":
            _send_to_main(stop.signal if isinstance(stop, Stopped) else signal.SIGINT)


def _interrupt(number: int, _: object) -> None:
    if _stops.failure is not None and _stops.phase == "raise":
        raise KeyboardInterrupt  # the only exception that a waiting call of Ray passes on


def _send_to_main(number: int) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, number)
