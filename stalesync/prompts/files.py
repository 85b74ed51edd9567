"""Read rows of a JSON, JSON Lines or Parquet file, and check each of them before the run starts."""

import json
import logging
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from stalesync.prompts.chats import normalize_chat, without_nulls
from stalesync.prompts.config import DataConfig
from stalesync.prompts.json_rows import JsonRows, path_of, value_at
from stalesync.prompts.rows import Row, Rows

log = logging.getLogger(__name__)
CheckRows = Callable[[Sequence[Row]], list[int | ValueError]]
SCAN = 1024
"""Rows that are checked at a time: tokenizers are faster on many texts."""
MOST_NESTED = 64
"""Maximum number of lists and objects in each other: copying and storing values recurses"""
ARGUMENTS = ("prompt", "response", "answer")
"""Arguments that every reward function receives; a column of such a name is not passed as a field."""


class RowsByIndex(Protocol):
    """The rows of a file by index. Raise ValueError for a row that cannot be read, without its name."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class FileRows(Rows):
    """Hold the rows of `data.source` that can be used. ``check``: returns for each of some rows the number of tokens
    of its prompt, or why the row cannot be used; ``held_out``: number of rows (at most a tenth), chosen by the seed,
    that are used only for evaluation. Raise ValueError if the file does not exist, cannot be read, is empty, or lacks a
    field; or, with `data.bad_rows` refuse, a row cannot be used. Names the file, the row and the key."""

    def __init__(self, config: DataConfig, seed: int, check: CheckRows, held_out: int = 0) -> None:
        self._config = config
        self._table, self.digest = _open(config)
        if not len(self._table):
            raise ValueError(f"data.source={config.source!r}: the file has no rows")
        self.usable, self.lengths = self._check_rows(check)
        usable = self.usable
        kept = min(held_out, len(usable) // 10)
        chosen = random.Random(f"{seed}-file-evaluation").sample(range(len(usable)), kept)
        self._held_out = [usable[position] for position in chosen]
        excluded = self._equal_to_held_out(chosen)
        self.indices = [index for index in usable if index not in excluded] if kept else usable

    def row(self, index: int) -> Row:
        try:
            return self._row(self._table[index])
        except ValueError as error:
            raise ValueError(f"{self.name(index)}: {error}") from None

    def name(self, index: int) -> str:
        return f"data.source={self._config.source!r} row {index} (counted from 0)"

    def longest(self) -> list[tuple[str, Row]]:
        return []  # `lengths` has all of them

    def evaluation(self, count: int) -> list[Row]:
        return [self.row(index) for index in self._held_out[:count]]

    def _equal_to_held_out(self, positions: Sequence[int]) -> set[int]:
        """Return the indices of the rows held out, by their positions, and of those that repeat one, which would be
        trained and evaluated, unless all do."""
        hashes, held_out = {self._hashes[position] for position in positions}, set(self._held_out)
        contents = {repr(self.row(index)) for index in held_out}
        same_hash = (index for index, one in zip(self.usable, self._hashes, strict=True) if one in hashes)
        repeated = {index for index in same_hash if index not in held_out and repr(self.row(index)) in contents}
        if len(repeated) + len(held_out) == len(self.usable):
            log.warning("data.source: all rows repeat held-out ones: evaluations are of prompts that are trained")
            return held_out
        if repeated:
            log.warning("data.source: %d rows repeat held-out ones, and are not trained", len(repeated))
        return held_out | repeated

    def _check_rows(self, check: CheckRows) -> tuple[Sequence[int], Sequence[int]]:
        """Return the indices of the rows that can be used, and the number of tokens of their prompts."""
        names: dict[str, None] = {}  # in order
        common: set[str] | None = None
        usable, lengths = array("q"), array("q")
        self._hashes = array("q")
        first_error = ""
        for start in range(0, len(self._table), SCAN):
            rows, errors = self._read(range(start, min(start + SCAN, len(self._table))), names)
            for (index, row), length in zip(rows.items(), check([*rows.values()]), strict=True):
                if isinstance(length, ValueError):
                    errors[index] = length
                    continue
                usable.append(index)
                lengths.append(length)
                self._hashes.append(hash((str(row.prompt), row.answer)))
                common = {*row.fields} if common is None else common & row.fields.keys()
            if errors and not first_error:
                first_error = f"{self.name(min(errors))}: {errors[min(errors)]}"
        self.num_bad = len(self._table) - len(usable)
        self.fields = frozenset(common or ())
        for key in ("prompt_field", "answer_field"):
            if names and not {name := getattr(self._config, key), name.partition(".")[0]} & names.keys():
                has = ", ".join(names)
                raise ValueError(f"data.{key}={name!r}: {self._config.source} has no such field; it has {has}")
        if self.num_bad and (self._config.bad_rows == "refuse" or not usable):
            others = f"; so are {self.num_bad - 1} other rows" if self.num_bad > 1 else ""
            raise ValueError(f"{first_error}{others}; correct the file, or skip such rows with data.bad_rows=skip")
        if self.num_bad:
            log.warning("%d of %d rows are skipped (data.bad_rows): %s", self.num_bad, len(self._table), first_error)
        passed = {self._config.prompt_field, self._config.answer_field}
        if shadowed := sorted({*ARGUMENTS} & names.keys() - passed):
            log.warning("data.source: the columns %s are not passed to the reward function", ", ".join(shadowed))
        if nested := self._fields_of_answer(usable[0]):
            log.warning(
                "data.answer_field=%r: an object, whose JSON text is the reference answer; its fields: %s",
                self._config.answer_field,
                ", ".join(nested),
            )
        return usable if self.num_bad else range(len(self._table)), lengths

    def _read(self, indices: Iterable[int], names: dict[str, None]) -> tuple[dict[int, Row], dict[int, ValueError]]:
        """Return the rows that could be read, and the errors of the others; add the names of all columns."""
        rows, errors = {}, {}
        for index in indices:
            try:
                columns = self._table[index]
                names.update(dict.fromkeys(columns))
                rows[index] = self._row(columns)
            except ValueError as error:
                errors[index] = error
        return rows, errors

    def _fields_of_answer(self, index: int) -> list[str]:
        """Return the names of the fields of a row's answer, as `data.answer_field` takes them, if it is an object."""
        columns = self._table.parsed(index) if isinstance(self._table, JsonRows) else self._table[index]
        answer = value_at(columns, path_of(columns, name := self._config.answer_field))
        return [f"{name}.{field}" for field in answer] if isinstance(answer, Mapping) else []

    def _row(self, columns: dict[str, Any]) -> Row:
        for name, value in columns.items():
            if _is_deeper(value, MOST_NESTED):
                raise ValueError(f"the field {name!r} is nested more than {MOST_NESTED} deep")
        config = self._config
        prompt, answer = (self._value(columns, key) for key in ("prompt_field", "answer_field"))
        if isinstance(prompt, list):
            prompt = normalize_chat(prompt if isinstance(self._table, JsonRows) else without_nulls(prompt))
        elif not isinstance(prompt, str):
            raise ValueError(
                f"data.prompt_field={config.prompt_field!r} holds a {type(prompt).__name__}; "
                "expected a text or a list of chat messages"
            )
        elif not prompt:
            raise ValueError(f"data.prompt_field={config.prompt_field!r} is an empty text")
        left_out = (config.prompt_field, config.answer_field, *ARGUMENTS)
        fields = {name: value for name, value in columns.items() if name not in left_out}
        for name, value in fields.items():
            if not _is_json(value):
                raise ValueError(
                    f"the column {name!r} holds a {type(value).__name__}, which a checkpoint cannot keep; store it as "
                    "text or as a number, or leave it out"
                )
        return Row(prompt, answer_text(answer), fields)

    def _value(self, columns: dict[str, Any], key: str) -> Any:
        name = getattr(self._config, key)
        path = path_of(columns, name)
        if not path:
            raise ValueError(f"there is no field data.{key}={name!r}; it has {', '.join(columns) or 'none'}")
        if (value := value_at(columns, path)) is None:
            raise ValueError(f"the field data.{key}={name!r} is empty")
        return value


def answer_text(value: Any) -> str:
    """Return an answer as text: a text as it is, anything else (from a Parquet file) as JSON where JSON has it, else by
    `str`. Raise ValueError if it is binary."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        raise ValueError("data.answer_field holds binary data; expected a text")
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (bool, list, dict)) else str(value)


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (list, tuple, dict)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(path, levels - 1) for path in inner)


def _is_json(value: Any) -> bool:
    """Whether a value of a row can be written to a checkpoint; Parquet also has dates, decimals and bytes."""
    if value is None or isinstance(value, (str, int, float)):
        return True
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return False


def _open(config: DataConfig) -> tuple[RowsByIndex, str]:
    """Open the file of `data.source`; return its rows and a digest of its content."""
    path = Path(config.source)
    if not path.is_file():
        raise ValueError(f"data.source={config.source!r}: no such file: {path.absolute()}")
    if not path.stat().st_size:
        raise ValueError(f"data.source={config.source!r}: the file is empty")
    try:
        table = open_rows(path, config.answer_field)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source={config.source!r}: cannot be read: {error}") from error
    return table, _digest(path)


def open_rows(path: Path, text_field: str = "") -> RowsByIndex:
    """Open a JSON, JSON Lines or Parquet file. ``text_field``: of `JsonRows`. Raise OSError or ValueError if it cannot
    be read."""
    return _parquet(path) if path.suffix == ".parquet" else JsonRows(path, text_field)


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _parquet(path: Path) -> RowsByIndex:
    """Open a Parquet file with the library `datasets` (memory-mapped, no network access), which opens no empty one."""
    import datasets
    from pyarrow.parquet import read_metadata

    if not read_metadata(path).num_rows:
        return []
    bars_enabled = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_parquet(str(path))
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    finally:
        if bars_enabled:
            datasets.enable_progress_bars()
