"""Write files that stay readable if the writing process is killed.

Lines are appended by one system call, so a killed process leaves complete lines and at most one incomplete line at the
end; `read_jsonl` ignores it, and `JsonLines` removes it before it appends. Any other line that cannot be parsed is
an error.

An error of a write names the file and, where there is no space, the bytes. A log (`JsonLines` with ``on_full``)
outlasts a full disk: its lines are kept in memory until there is space.

No file is written through a symbolic link: a link with the name of a file is replaced by `write_atomic`, and refused by
everything that appends (OSError, ELOOP)."""

import ctypes
import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Arguments of renameat2(2)"""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for want of space, of quota, or by a limit on the size of files"""
MAX_PENDING_BYTES = 16 << 20
"""Maximum size of the lines that a log keeps in memory while there is no space; it drops more"""
TAIL_BYTES = 1 << 16

NOT_FINITE = "not_finite"
"""Field that lists the numbers of an object that are not finite"""
NOTHING: Mapping[str, type] = MappingProxyType({})

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}", re.DOTALL)
"""Names of the files of `open_temporary`"""


class JsonLines:
    """Append one JSON object per line to `path`. NaN and infinities, which JSON lacks, are written as null and their
    names listed under "not_finite".
    ``on_full``: called with the error when there begins to be no space; the lines are then kept in memory, and written
    with the next ones. None: the error is raised."""

    def __init__(self, path: Path | str, on_full: Callable[[OSError], None] | None = None) -> None:
        self.path, self._on_full = Path(path), on_full
        self._pending, self._is_full = b"", False
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        cut_torn_line(self._fd)

    def write(self, *records: Mapping[str, Any]) -> None:
        """Append the objects by one system call."""
        lines = [ENCODER.encode(finite(record)) + "\n" for record in records]
        self._append("".join(lines).encode())

    def write_each(
        self,
        before: Mapping[str, Any],
        field: str,
        values: Iterable[str],
        after: Mapping[str, Any],
        own: Mapping[str, Sequence[int | list[int]]] | None = None,
    ) -> None:
        """Append an object for each of the strings, by one system call: the fields ``before``, ``field`` with the
        string, the fields ``after``, and those of ``own``, which has a column for each: a whole number or a list of
        them for every string. Neither ``before`` nor ``after`` is empty. What the objects have in common is encoded
        once."""
        head = f"{ENCODER.encode(finite(before))[:-1]}, {ENCODER.encode(field)}: "
        tail = ENCODER.encode(finite(after))[1:-1]
        lines = [f"{head}{ENCODER.encode(value)}, {tail}" for value in values]
        for name, column in (own or {}).items():  # Python writes whole numbers and lists of them as JSON does
            more = f", {ENCODER.encode(name)}: "
            lines = [f"{line}{more}{numbers}" for line, numbers in zip(lines, column, strict=True)]
        lines.append("")
        self._append("}\n".join(lines).encode())

    def close(self) -> None:
        if self._fd >= 0:
            if self._pending:
                self._append(b"")
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        data, end = self._pending + data, os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data, path=self.path)
            self._pending, self._is_full = b"", False
        except OSError as error:
            os.ftruncate(self._fd, end)  # a later line must not follow a part of one
            if self._on_full is None or error.errno not in FULL:
                raise
            self._pending = data if len(data) <= MAX_PENDING_BYTES else b""
            if not self._is_full:
                self._is_full = True
                self._on_full(error)


def read_jsonl(path: Path | str, required: Mapping[str, type] = NOTHING) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; an incomplete last line is ignored. A missing file has none.
    ``required``: fields that every object must have, with their types.
    Raise ValueError: a line is no object, or lacks such a field; names file and line."""
    return list(iterate_jsonl(path, required))


def iterate_jsonl(path: Path | str, required: Mapping[str, type] = NOTHING) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file one by one, as `read_jsonl` returns them: for files of any size."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: expected one JSON object: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: expected one JSON object, not {type(record).__name__}")
            for field, kind in required.items():
                if not isinstance(record.get(field), kind):
                    raise ValueError(f"{path}, line {number}: expected {field!r} of the type {kind.__name__}")
            yield record


def cut_torn_line(fd: int) -> None:
    """Remove everything after the last newline of an open file."""
    end = size = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)


def write_atomic(path: Path | str, text: str) -> None:
    """Replace a file atomically: a reader sees either the old or the new content."""
    path = Path(path)
    temporary, fd = open_temporary(path)
    try:
        write_all(fd, text.encode(), path=path)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def remove_temporary(folder: Path) -> None:
    """Remove the files of `open_temporary` that killed processes have left in `folder`. No other process may write
    there."""
    for path in folder.iterdir():
        if TEMPORARY.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def open_temporary(path: Path) -> tuple[Path, int]:
    """Create a file beside `path`, to be renamed to it. Return its path, and a descriptor for reading and writing."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    return temporary, open_new(temporary)


def open_new(path: Path) -> int:
    """Create a file and return a descriptor for reading and writing.
    Raise FileExistsError: the name is taken, by a file or a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two files or folders by name, atomically. Return False, with nothing changed, if the system or the file
    system has no such operation.
    Raise OSError: one of them does not exist, or may not be renamed."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # glibc before 2.28, musl, other systems than Linux
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder` durably and atomically, and delete the previous folder of that name.

    On a file system that cannot exchange two folders (`exchange`; NFS, for one) two renames are needed: a crash between
    them leaves no `folder`, the previous one as `folder.old`, and the complete new one as `new`."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    sync(new)
    if not folder.exists():
        new.rename(folder)
    elif exchange(new, folder):
        old = new
    else:
        folder.rename(old)
        new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_all(
    fd: int, data: bytes | memoryview, offset: int | None = None, path: Path | None = None, total: int | None = None
) -> None:
    """Write every byte, at `offset` if given; the first call usually takes all of them.
    ``path``: that an error names; None: the name of the open file.
    ``total``: bytes that it names where there is no space, if the data are a part of what is written."""
    view = memoryview(data)
    with naming_file(fd if path is None else path, len(view) if total is None else total):
        while view:
            written = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
            view = view[written:]
            offset = None if offset is None else offset + written


@contextmanager
def naming_file(file: int | Path, nbytes: int) -> Iterator[None]:
    """Add what an error of a descriptor lacks: the path, and where there is no space, the bytes.
    ``file``: the path, or a descriptor.
    ``nbytes``: to be written in the block."""
    try:
        yield
    except OSError as error:
        path, text = str(file), error.strerror
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else path
        if error.errno in FULL:
            about = os.statvfs(file if isinstance(file, int) else file.parent)
            text = f"{text} ({nbytes:,} bytes to write, {about.f_bavail * about.f_frsize:,} bytes are free)"
        raise OSError(error.errno, text, path) from error


@contextmanager
def tolerating_full(report: Callable[[OSError], None]) -> Iterator[None]:
    """Report an error of the block, which writes a log, instead of raising it, if there is no space."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        report(error)


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as plain JSON values: tensors and arrays as numbers and lists, other objects by their text,
    non-finite numbers as None with their names and values under "not_finite"."""
    broken: dict[str, str] = {}
    values = {str(name): plain(value, str(name), broken) for name, value in record.items()}
    return values | {NOT_FINITE: broken} if broken else values


def plain(value: Any, name: str, broken: dict[str, str]) -> Any:
    """Return a value as `finite` does; add those that are not finite to ``broken``, by their names below ``name``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist(), name, broken)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        broken[name] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}", broken) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{name}.{index}", broken) for index, item in enumerate(value)]
    return str(value)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming_file(path, os.fstat(handle).st_size):
            os.fsync(handle)
    finally:
        os.close(handle)
