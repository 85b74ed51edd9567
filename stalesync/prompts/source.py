"""Yield prompts in a seeded, endless order that resumes at exactly the next prompt.

Invariants:
1. The n-th prompt depends only on the config, the seed and n, not on the sizes of the calls of `next`, nor on whether
   the state was saved and loaded in between.
2. Each epoch of a finite source is one pass in a new order; a row that is not skipped appears exactly once.
3. Ids are `e{epoch}-{row}`: unique in a run, and the same for the same seed.
4. No prompt is longer than `data.max_prompt_length`; with `refuse` this is checked before the first prompt.
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
    """`ids` are the model's input tokens, chat template included; `text` is the prompt as stored in the data (a chat is
    rendered); `fields` are the row's other columns."""

    id: str
    ids: tuple[int, ...]
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


class PromptSource:
    """Yields the prompts of `config.source` for `tokenizer` (any Hugging Face tokenizer). `held_out` rows of a file (at
    most a tenth) are excluded from `next` and used by `evaluation`; generators do not use `held_out`.

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
        num_prompts = self._config.prompts_per_step if n is None else n
        taken: list[Prompt] = []
        skipped_in_a_row = 0
        while len(taken) < num_prompts:
            drawn = [self._advance() for _ in range(num_prompts - len(taken))]
            prompts = self._prompts([(f"e{epoch}-{index}", index) for epoch, index in drawn])
            fitting = [prompt for prompt in prompts if len(prompt.ids) <= self._config.max_prompt_length]
            self._skipped += len(prompts) - len(fitting)
            taken += fitting
            skipped_in_a_row = 0 if fitting else skipped_in_a_row + len(prompts)
            if skipped_in_a_row > max(len(self._rows.indices or ()), 1000):
                raise ValueError(f"data.max_prompt_length={self._config.max_prompt_length}: no prompt is that short")
        return taken

    def evaluation(self, n: int) -> list[Prompt]:
        """Returns `n` held-out prompts with ids `eval-0`, …: the same on every call, and none that `next` returns
        (except for the one-digit sums, which are all used for both). A file has at most `held_out`."""
        rows = self._rows.evaluation(n)
        names = [f"eval-{index}" for index in range(len(rows))]
        prompts = self._encode(names, rows, names)
        return [prompt for prompt in prompts if len(prompt.ids) <= self._config.max_prompt_length]

    def metrics(self) -> dict[str, float]:
        """Returns `data/epoch`, and `data/skipped_prompts` since the start of the run."""
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
        """Moves to the next prompt and returns its (epoch, row)."""
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

    def _prompts(self, drawn: Sequence[tuple[str, int]]) -> list[Prompt]:
        names = [self._rows.name(index) for _, index in drawn]
        return self._encode([id_ for id_, _ in drawn], [self._rows.row(index) for _, index in drawn], names)

    def _encode(self, ids: Sequence[str], rows: Sequence[Row], names: Sequence[str]) -> list[Prompt]:
        if not rows:
            return []
        templated = self._config.chat_template == "auto" and bool(getattr(self._tokenizer, "chat_template", None))
        texts = [self._render(row, templated, name) for row, name in zip(rows, names, strict=True)]
        # A template writes the special tokens itself.
        encoded = self._tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        return [
            Prompt(
                id=id_,
                ids=tuple(tokens),
                text=row.prompt if isinstance(row.prompt, str) else text,
                answer=row.answer,
                fields=row.fields,
            )
            for id_, tokens, row, text in zip(ids, encoded, rows, texts, strict=True)
        ]

    def _render(self, row: Row, templated: bool, name: str) -> str:
        if not templated:
            if isinstance(row.prompt, str):
                return row.prompt
            raise ValueError(
                f"{name}: the prompt is a chat, which needs a tokenizer with a chat template, and chat_template=auto"
            )
        chat = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _refuse_long(self) -> None:
        limit = self._config.max_prompt_length
        for prompt in self._whole_source():
            if len(prompt.ids) > limit:
                raise ValueError(
                    f"{prompt.id}: a prompt of {len(prompt.ids)} tokens is longer than data.max_prompt_length={limit}; "
                    "increase it, or skip such prompts with data.long_prompts=skip"
                )

    def _whole_source(self) -> Iterator[Prompt]:
        """Yields every prompt with its row's name as id; of an endless source, only the longest."""
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
        return WorkedRows(seed, min_digits=config.min_digits, max_digits=config.max_digits, max_terms=config.max_terms)
    return FileRows(config, seed, held_out)


def solution_ids(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens of a correct response with the end token, for supervised warm-up; only for generators."""
    ids = tokenizer(prompt.fields["solution"], add_special_tokens=False)["input_ids"]
    return (*ids, tokenizer.eos_token_id)
