"""Read the rows of a JSON Lines file, or of a JSON file with one array, by index. Values keep what the file says:
numbers of any size, and for one chosen field the text of its value in the file.

The library `datasets` is not used for JSON: it infers one type for a column, and changes answers on the way
("2024-01-01" becomes a timestamp, 12345678901234567890 becomes 1.2e19, and [2, 2.5] becomes 2.0 and 2.5)."""

import json
import mmap
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, BinaryIO

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode
BOM = b"\xef\xbb\xbf"


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


class JsonRows:
    """Hold the place of every row in the file, which stays open and memory-mapped. ``text_field``: the field whose
    value is returned as text: of a JSON string its content, of any other value the text in the file. Raise ValueError
    if the file is an array that is not valid JSON. A line that is not is an error of its row only."""

    def __init__(self, path: Path, text_field: str) -> None:
        self._path, self._text_field = path, text_field
        self._file: BinaryIO = path.open("rb")
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._status = self._file_status()
        first = re.compile(rb"[ \t\r\n]*").match(self._bytes, len(BOM) if self._bytes[:3] == BOM else 0)
        assert first is not None
        start = first.end()
        self._starts, self._ends = array("q"), array("q")
        if self._bytes[start : start + 1] == b"[":
            self._find_elements(start)
        else:
            self._find_lines(start)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the fields of a row; raise ValueError if it is not a JSON object in UTF-8, or has a field twice, or
        the file was changed."""
        return self.parsed(index, self._text_field)

    def parsed(self, index: int, text_field: str = "") -> dict[str, Any]:
        """Return the fields of a row as `parse_object`; by default none of them as text."""
        if self._file_status() != self._status:
            raise ValueError(f"{self._path} was changed while it was read")
        try:
            return parse_object(self._bytes[self._starts[index] : self._ends[index]].decode(), text_field)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
        except RecursionError:
            raise ValueError("not valid JSON: nested too deeply") from None

    def _file_status(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_mtime_ns, status.st_size

    def _find_lines(self, start: int) -> None:
        self._bytes.seek(start)
        while line := self._bytes.readline():
            if line.strip():
                self._starts.append(start)
                self._ends.append(start + len(line))
            start += len(line)

    def _find_elements(self, start: int) -> None:
        """Find the elements of one array. Positions in the text are converted to those in the bytes."""
        try:
            text = self._bytes[start:].decode()
            at, counted, offset = _skip_space(text, 1), 0, start
            while text[at : at + 1] != "]":
                _, end = _decode(text, at)
                offset += len(text[counted:at].encode())
                self._starts.append(offset)
                offset += len(text[at:end].encode())
                self._ends.append(offset)
                counted, at = end, _skip_space(text, end)
                if text[at : at + 1] == ",":
                    at = _skip_space(text, at + 1)
                    if text[at : at + 1] == "]":
                        raise json.JSONDecodeError("Expecting value", text, at)
                elif text[at : at + 1] != "]":
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            if text[at + 1 :].strip():
                raise json.JSONDecodeError("Extra data", text, at + 1)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"row {len(self)} of the array is not valid JSON: {error}") from None


def parse_object(text: str, text_field: str) -> dict[str, Any]:
    """Return the fields of a JSON object; the value of ``text_field`` as text, unless it is null. Where that is a field
    of a nested object (`a.b`), its text is added under the whole name. Raise json.JSONDecodeError if it is not valid,
    ValueError if it is not an object, or has a field twice."""
    fields = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    path = path_of(fields, text_field)
    value = value_at(fields, path)
    if value is not None and not isinstance(value, str):
        for name in path:
            text = _text_of(text, name)
        fields[text_field] = text
    return fields


def path_of(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names that lead to a field: ``name`` itself where there is such a field, else, for `a.b`, those of
    nested objects; () if there is none."""
    if name in fields:
        return (name,)
    head, _, rest = name.partition(".")
    inner = fields.get(head)
    path = path_of(inner, rest) if rest and isinstance(inner, Mapping) else ()
    return (head, *path) if path else ()


def value_at(fields: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value of a field by its path; None: there is none."""
    value: Any = fields if path else None
    for name in path:
        value = value[name]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in fields if names.count(name) > 1)!r} is there twice")
    return fields


def _text_of(text: str, field: str) -> str:
    """Return the text of a field's value in a valid object that has it."""
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while True:
        name, at = scanstring(text, at + 1)
        start = _skip_space(text, _skip_space(text, at) + 1)  # behind the colon
        _, end = _decode(text, start)
        if name == field:
            return text[start:end]
        at = _skip_space(text, _skip_space(text, end) + 1)  # behind the comma
