"""Yields prompts in a seeded, endless order that resumes at exactly the next prompt.

Invariants:
1. The n-th prompt depends on the config, the seed and n only: never on the sizes of the calls of `next`, nor on whether
   the state was saved and loaded in between.
2. Each epoch of a finite source is one pass in a new order; a row that is not skipped appears exactly once.
3. Ids are `e{epoch}-{row}`: never the same twice in a run, always the same for the same seed.
4. No prompt is longer than `data.max_prompt_length`; with `refuse` that is checked before the first prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stalesync.prompts.addition import AdditionRows
from stalesync.prompts.config import DataConfig
from stalesync.prompts.files import FileRows
from stalesync.prompts.rows import Row, Rows
from stalesync.prompts.worked import WorkedRows

SCAN = 1024


@dataclass(frozen=True)
class Prompt:
    """`ids` are the tokens the model is given, chat template included; `text` is the prompt as the data holds it (of a
    chat, the rendered one); `fields` are the row's other columns."""

    id: str
    ids: tuple[int, ...]
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


class PromptSource:
    """The prompts of `config.source` for `tokenizer` (any Hugging Face tokenizer). Of a file, `held_out` rows (at most
    a tenth) are kept out of `next` for `evaluation`; a generator needs no such number.

    Raises:
        ValueError: the config is wrong, the file lacks a field, or a prompt is too long and `data.long_prompts` is
            `refuse` (naming row and key).
    """

    def __init__(self, config: DataConfig, tokenizer: Any, seed: int, held_out: int = 0) -> None:
        config.validate()
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._rows = open_rows(config, seed, held_out)
        self._epoch = 0
        self._position = 0
        self._skipped = 0
        self._order: tuple[int, list[int]] = (-1, [])
        if config.long_prompts == "refuse":
            self._refuse_long()

    def next(self, n: int | None = None) -> list[Prompt]:
        """Returns the next `n` prompts (default: `data.prompts_per_step`), without those that are skipped as too
        long."""
        wanted = self._config.prompts_per_step if n is None else n
        taken: list[Prompt] = []
        barren = 0
        while len(taken) < wanted:
            drawn = [self._advance() for _ in range(wanted - len(taken))]
            prompts = self._prompts([(f"e{epoch}-{index}", index) for epoch, index in drawn])
            fitting = [prompt for prompt in prompts if len(prompt.ids) <= self._config.max_prompt_length]
            self._skipped += len(prompts) - len(fitting)
            taken += fitting
            barren = 0 if fitting else barren + len(prompts)
            if barren > max(len(self._rows.indices or ()), 1000):
                raise ValueError(f"data.max_prompt_length={self._config.max_prompt_length}: no prompt is that short")
        return taken

    def evaluation(self, n: int) -> list[Prompt]:
        """Returns `n` held-out prompts, with ids `eval-0`, …: the same on every call, and none that `next` ever gives
        (but of the 100 one-digit sums: all of them). Of a file fewer, none if nothing was held out."""
        rows = self._rows.evaluation(n)
        names = [f"eval-{index}" for index in range(len(rows))]
        prompts = self._encode(names, rows, names)
        return [prompt for prompt in prompts if len(prompt.ids) <= self._config.max_prompt_length]

    def metrics(self) -> dict[str, float]:
        """`data/epoch`, and `data/skipped_prompts` since the start of the run."""
        return {"data/epoch": float(self._epoch), "data/skipped_prompts": float(self._skipped)}

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs to resume at the next prompt; plain JSON."""
        return {
            "source": self._config.source,
            "rows": self._row_count,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where `state` was taken.

        Raises:
            ValueError: the state belongs to another source, number of rows or seed, by name.
        """
        for key, value in (("source", self._config.source), ("rows", self._row_count), ("seed", self._seed)):
            if state[key] != value:
                raise ValueError(f"data: cannot resume: the saved run had {key}={state[key]!r}, this one has {value!r}")
        self._epoch, self._position, self._skipped = state["epoch"], state["position"], state["skipped"]

    @property
    def _row_count(self) -> int | None:
        return None if self._rows.indices is None else len(self._rows.indices)

    def _advance(self) -> tuple[int, int]:
        """(epoch, row) of the next prompt."""
        indices = self._rows.indices
        if indices is None:
            self._position += 1
            return 0, self._position - 1
        if self._position == len(indices):
            self._epoch, self._position = self._epoch + 1, 0
        if self._order[0] != self._epoch:
            order = list(indices)
            random.Random(f"{self._seed}-epoch-{self._epoch}").shuffle(order)
            self._order = (self._epoch, order)
        self._position += 1
        return self._epoch, self._order[1][self._position - 1]

    def _prompts(self, wanted: Sequence[tuple[str, int]]) -> list[Prompt]:
        names = [self._rows.name(index) for _, index in wanted]
        return self._encode([id_ for id_, _ in wanted], [self._rows.row(index) for _, index in wanted], names)

    def _encode(self, ids: Sequence[str], rows: Sequence[Row], names: Sequence[str]) -> list[Prompt]:
        if not rows:
            return []
        templated = self._config.chat_template == "auto" and bool(getattr(self._tokenizer, "chat_template", None))
        texts = [self._render(row, templated, name) for row, name in zip(rows, names, strict=True)]
        # A template writes the special tokens itself.
        encoded = self._tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        return [
            Prompt(id_, tuple(tokens), row.prompt if isinstance(row.prompt, str) else text, row.answer, row.fields)
            for id_, tokens, row, text in zip(ids, encoded, rows, texts, strict=True)
        ]

    def _render(self, row: Row, templated: bool, name: str) -> str:
        if not templated:
            if isinstance(row.prompt, str):
                return row.prompt
            raise ValueError(f"{name}: the prompt is a chat, which needs a tokenizer with a chat template in use")
        chat = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _refuse_long(self) -> None:
        limit = self._config.max_prompt_length
        for prompt in self._whole_source():
            if len(prompt.ids) > limit:
                raise ValueError(
                    f"{prompt.id}: a prompt of {len(prompt.ids)} tokens is longer than data.max_prompt_length={limit}; "
                    "raise it, or leave such prompts out with data.long_prompts=skip"
                )

    def _whole_source(self) -> Iterator[Prompt]:
        """Every prompt under its row's name; of an endless source the longest."""
        if isinstance(self._rows, WorkedRows):
            name = "the longest problem of data.source='worked_arithmetic'"
            yield from self._encode([name], [self._rows.longest()], [name])
            return
        indices = self._rows.indices
        assert indices is not None
        for start in range(0, len(indices), SCAN):
            yield from self._prompts([(self._rows.name(i), i) for i in indices[start : start + SCAN]])


def open_rows(config: DataConfig, seed: int, held_out: int = 0) -> Rows:
    """Opens the rows of `data.source`."""
    if config.source == "addition":
        return AdditionRows(seed)
    if config.source == "worked_arithmetic":
        return WorkedRows(seed, config.min_digits, config.max_digits, config.max_terms)
    return FileRows(config, seed, held_out)


def solution_ids(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of a right response with the end token, for supervised warm-up; the prompt must be a generator's."""
    ids = tokenizer(prompt.fields["solution"], add_special_tokens=False)["input_ids"]
    return (*ids, tokenizer.eos_token_id)
