"""Write files that stay readable if the writing process is killed.

Each line is written by one system call, so a killed process leaves complete lines and at most one incomplete line at
the end; `read_jsonl` ignores it, and `JsonLines` removes it before it appends. Any other line that cannot be parsed is
an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends one JSON object per line to `path`. NaN and infinities, which JSON lacks, are written as null and their
    names listed under "not_finite"."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        cut_torn_line(self.path)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
        write_all(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; an incomplete last line is ignored. A missing file has none."""
    path = Path(path)
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected one JSON object: {error}") from None
    return records


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite a JSON-lines file with only the objects that `keep` accepts; returns how many were dropped."""
    records = read_jsonl(path)
    kept = [record for record in records if keep(record)]
    if len(kept) < len(records):
        write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    return len(records) - len(kept)


def cut_torn_line(path: Path) -> None:
    """Remove everything after the last newline."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def write_atomic(path: Path | str, text: str) -> None:
    """Replace a file atomically: a reader sees either the old or the new content."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    """Write every byte, at `offset` if given; the first call usually takes all of them."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[written:]
        offset = None if offset is None else offset + written


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as plain JSON values: tensors and arrays as numbers and lists, other objects by their text, non-finite
    numbers as None with their names and values under "not_finite"."""
    broken: dict[str, str] = {}
    plain = {str(name): _plain(value, str(name), broken) for name, value in record.items()}
    return plain | {"not_finite": broken} if broken else plain


def _plain(value: Any, name: str, broken: dict[str, str]) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        broken[name] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", broken) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", broken) for index, item in enumerate(value)]
    return str(value)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
