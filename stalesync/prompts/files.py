"""Reads rows of a JSONL or Parquet file with the library `datasets` (memory-mapped, no network access)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import Row


class FileRows:
    """Holds the rows of `data.source`. `held_out` of them (at most a tenth), chosen by the seed, are used only for
    evaluation.

    Raises:
        ValueError: the file does not exist, cannot be read, is empty, or lacks a field; names the file and the key.
    """

    def __init__(self, config: DataConfig, seed: int, held_out: int = 0) -> None:
        self._config = config
        self._table = _read(config.source)
        count, fields = len(self._table), list(self._table.column_names)
        if not count:
            raise ValueError(f"data.source={config.source!r}: the file has no rows")
        for key in ("prompt_field", "answer_field"):
            name = getattr(config, key)
            if name not in fields:
                has = ", ".join(fields)
                raise ValueError(f"data.{key}={name!r}: {config.source} has no such field; it has {has}")
        kept = min(held_out, count // 10)
        self._held_out = random.Random(f"{seed}-file-evaluation").sample(range(count), kept)
        self.indices: Sequence[int] = range(count) if not kept else sorted(set(range(count)) - set(self._held_out))

    def row(self, index: int) -> Row:
        columns = dict(self._table[index])
        prompt = self._value(columns, index, "prompt_field")
        answer = self._value(columns, index, "answer_field")
        if not isinstance(prompt, (str, list)):
            raise ValueError(
                f"{self.name(index)}: data.prompt_field={self._config.prompt_field!r} holds a {type(prompt).__name__}; "
                "expected a text or a list of chat messages"
            )
        used = (self._config.prompt_field, self._config.answer_field)
        return Row(prompt, str(answer), {key: value for key, value in columns.items() if key not in used})

    def _value(self, columns: dict[str, Any], index: int, key: str) -> Any:
        name = getattr(self._config, key)
        if columns[name] is None:
            raise ValueError(f"{self.name(index)}: the field data.{key}={name!r} is empty")
        return columns[name]

    def name(self, index: int) -> str:
        return f"data.source={self._config.source!r} row {index} (counted from 0)"

    def evaluation(self, count: int) -> list[Row]:
        return [self.row(index) for index in self._held_out[:count]]


def _read(source: str) -> Any:
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"data.source={source!r}: no such file: {path.absolute()}")
    if not path.stat().st_size:
        raise ValueError(f"data.source={source!r}: the file is empty")
    import datasets

    reader = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_json
    bars_enabled = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return reader(str(path))
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"data.source={source!r}: cannot be read: {error.__cause__ or error}") from error
    finally:
        if bars_enabled:
            datasets.enable_progress_bars()
