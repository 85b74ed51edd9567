"""Write what a process logs and prints to a file in the run's folder, which stays when the process is killed."""

import faulthandler
import io
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion.telemetry.files import tolerating_full, write_all

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger(__name__)


def write_log_to(path: str) -> None:
    """Append to a file what this process logs, prints, or writes from C++, and its stack if it crashes, from now on.
    Where the file cannot be opened, because this host does not have the folder, all stays as it is."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        log.warning("no log in the run's folder: %s", error)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (_text(_Tolerant(fd, "w")) for fd in (1, 2))
    faulthandler.enable(file=2)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT, force=True)
    log.info("process %d on %s", os.getpid(), socket.gethostname())


class _Tolerant(io.FileIO):
    """Drop what finds no space: a log that cannot be written must not end what it reports of."""

    def __init__(self, file: int | Path, mode: str, on_full: Callable[[OSError], None] = lambda error: None) -> None:
        super().__init__(file, mode, closefd=isinstance(file, Path))
        self._on_full = on_full

    def write(self, data: Any, /) -> int:
        with tolerating_full(self._on_full):
            write_all(self.fileno(), data)
        return len(data)


def _text(log: _Tolerant) -> io.TextIOWrapper:
    """Open a log for text. Every line is written at once: what was printed is not lost in a crash."""
    return io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", line_buffering=True)


@contextmanager
def logging_to(path: Path, earlier: Sequence[logging.LogRecord] = ()) -> Iterator[list[str]]:
    """Append to a file what this process logs in the block; warnings are still printed to the standard error. Yields
    the notes of the final report: ``earlier`` warnings, and whether there was no space for the file. ``earlier``: of
    `keeping_warnings`; they are written first."""
    notes = [record.getMessage().partition("\n")[0] for record in earlier]

    def note_full(error: OSError) -> None:
        if len(notes) == len(earlier):
            notes.append(f"{error}: the run continues, and the log has a gap")
            print(notes[-1], file=sys.stderr)

    root = logging.getLogger()
    level, file = root.level, logging.StreamHandler(stream := _text(_Tolerant(path, "a", note_full)))
    file.setFormatter(logging.Formatter(FORMAT))
    for record in earlier:
        file.handle(record)
    root.setLevel(logging.INFO)
    try:
        with _added(file):
            yield notes
    finally:
        root.setLevel(level)
        stream.close()


@contextmanager
def keeping_warnings(kept: list[logging.LogRecord]) -> Iterator[None]:
    """Add to a list the warnings of the block, which are still printed, for the log of a run that has none yet."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = kept.append  # type: ignore[assignment, method-assign]
    with _added(handler):
        yield


@contextmanager
def _added(handler: logging.Handler) -> Iterator[None]:
    """Let a handler receive what this process logs in the block, besides those that print it."""
    root = logging.getLogger()
    handlers = [handler]
    if not root.handlers:
        console = logging.StreamHandler()
        console.setLevel(logging.WARNING)
        handlers.append(console)
    for one in handlers:
        root.addHandler(one)
    try:
        yield
    finally:
        for one in handlers:
            root.removeHandler(one)
            one.close()


@contextmanager
def stderr_to(path: Path | None) -> Iterator[None]:
    """Append to a file what the process, also from C++, writes to its standard error in the block. None: changes
    nothing."""
    if path is None:
        yield
        return
    sys.stderr.flush()
    before, file = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
