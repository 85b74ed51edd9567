"""Yield prompts in a seeded, endless order that resumes at exactly the next prompt.

Invariants:
1. The n-th prompt depends only on the config, the seed and n, not on the sizes of the calls of `next`, nor on whether
   the state was saved and loaded in between.
2. Each epoch of a finite source is one pass in a new order; a row that is not skipped appears exactly once.
3. Ids are `e{epoch}-{row}`: unique in a run, and the same for the same seed.
4. No prompt is empty or longer than `data.max_prompt_length`; with `refuse` this is checked before the first prompt."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusion.rewards import ReferenceAnswer, RewardSample
from fusion.telemetry.classes import find_class
from stalesync.prompts.config import GENERATORS, SUFFIXES, DataConfig
from stalesync.prompts.files import FileRows
from stalesync.prompts.rows import Row, RowCounts, Rows
from stalesync.prompts.template import ChatTemplate, EndlessTemplate


@dataclass(frozen=True)
class Prompt:
    """`ids` are the model's input tokens, chat template included; `text` is the prompt as stored in the data (a chat is
    rendered); `fields` are the row's other columns; `prefill` is the end of the prompt that belongs to the response;
    `chat` is the row's prompt where it is a chat; `messages` are the first ones of its environment, if it has one, and
    `tools` the JSON schemas of its tools."""

    id: str
    ids: tuple[int, ...]
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    prefill: str = ""
    chat: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        unset = [name for name in ("prefill", "messages", "tools") if not state[name]]
        for name in (*unset, *(() if self.chat and self.messages else ("chat",))):
            del state[name]
        return state

    def for_reward(self, response: str, others: Sequence[str] = ()) -> RewardSample:
        """Return what a reward sees of a response to the prompt. ``others``: the other responses of its group."""
        return RewardSample(self.text, response, self.answer, self.fields, others, self.prefill)


class PromptSource:
    """Yield the prompts of `config.source` for `tokenizer` (any Hugging Face tokenizer). `held_out` rows of a file (at
    most a tenth) are excluded from `next` and used by `evaluation`; generators do not use `held_out`. Raise ValueError
    if the config is wrong, the file lacks a field, a row cannot be used and `data.bad_rows` is `refuse`, or a prompt is
    too long and `data.long_prompts` is `refuse` (naming row and key)."""

    def __init__(self, config: DataConfig, tokenizer: Any, seed: int, held_out: int = 0) -> None:
        config.validate()
        self._config = config
        self.template = ChatTemplate(config, tokenizer)
        self._seed = seed
        self.rows = self._open_rows(held_out)
        self._indices = self._choose_rows()
        self._epoch = 0
        self._position = 0
        self._skipped = 0
        self._order: tuple[int, list[int]] = (-1, [])
        if config.long_prompts == "refuse":
            self._refuse_long()

    def next(self, n: int | None = None) -> list[Prompt]:
        """Return the next `n` prompts (default: `data.prompts_per_step`), without those that are skipped as too
        long."""
        num_prompts = self._config.prompts_per_step if n is None else n
        taken: list[Prompt] = []
        skipped_in_a_row = 0
        while len(taken) < num_prompts:
            drawn = [self._advance() for _ in range(num_prompts - len(taken))]
            prompts = self._prompts([(f"e{epoch}-{index}", index) for epoch, index in drawn])
            fitting = self._fitting(prompts)
            self._skipped += len(prompts) - len(fitting)
            taken += fitting
            skipped_in_a_row = 0 if fitting else skipped_in_a_row + len(prompts)
            if skipped_in_a_row > max(len(self._indices or ()), 1000):
                raise ValueError(f"data.max_prompt_length={self._config.max_prompt_length}: no prompt is that short")
        return taken

    def evaluation(self, n: int) -> list[Prompt]:
        """Return `n` held-out prompts with ids `eval-0`, …: the same on every call, and none that `next` returns
        (except for the one-digit sums, which are all used for both). A file has at most `held_out`."""
        rows = self.rows.evaluation(n)
        names = [f"eval-{index}" for index in range(len(rows))]
        return self._fitting(self._encode(names, rows))

    def in_order(self, prefix: str) -> list[Prompt]:
        """Return the prompts of an epoch of a file in the order of its rows, without those that are skipped as too
        long; the id of each is the index of its row behind ``prefix``."""
        assert self._indices is not None, f"there is no end to the rows of {self._config.source}"
        return self._fitting(self._prompts([(f"{prefix}{index}", index) for index in self._indices]))

    def reference_answers(self, count: int) -> list[ReferenceAnswer]:
        """Return the answers of up to ``count`` training rows, spread evenly; does not advance."""
        return [ReferenceAnswer(f"row {index}", self.rows.row(index).answer) for index in self._spread(count)]

    def sample(self, count: int) -> list[Prompt]:
        """Return the prompts of up to ``count`` training rows, spread evenly; does not advance. Raise ValueError if all
        of them are too long."""
        prompts = self._fitting(self._prompts([(f"row {index}", index) for index in self._spread(count)]))
        if not prompts:
            raise ValueError(f"data.max_prompt_length={self._config.max_prompt_length}: no prompt is that short")
        return prompts

    @property
    def num_too_long(self) -> int:
        """Number of rows of an epoch whose prompts are skipped as too long."""
        rows, limit = zip(self.rows.usable, self.rows.lengths, strict=True), self._config.max_prompt_length
        too_long = {index for index, length in rows if length > limit}
        return sum(index in too_long for index in self._indices or ()) if too_long else 0

    def _spread(self, count: int) -> Sequence[int]:
        indices = range(count) if self._indices is None else self._indices
        return [indices[place * len(indices) // count] for place in range(count)] if len(indices) > count else indices

    def counts(self, evaluated: Sequence[Prompt], held_out: int | None = None) -> RowCounts:
        """Return what became of the rows of which `in_order`, or `evaluation` of ``held_out`` rows, has returned the
        prompts ``evaluated``."""
        if held_out is not None:
            read = len(self.rows.evaluation(held_out))
            return RowCounts(read, bad=0, unused=0, too_long=read - len(evaluated), evaluated=len(evaluated))
        assert self.rows.indices is not None and self.num_rows is not None
        usable, bad = len(self.rows.indices), self.rows.num_bad
        unused, too_long = usable - self.num_rows, self.num_rows - len(evaluated)
        return RowCounts(usable + bad, bad=bad, unused=unused, too_long=too_long, evaluated=len(evaluated))

    def metrics(self) -> dict[str, float]:
        """Return `data/epoch`, `data/skipped_prompts` since the start of the run, and `data/bad_rows` of the file if
        it has any."""
        bad = {"data/bad_rows": float(self.rows.num_bad)} if self.rows.num_bad else {}
        return {"data/epoch": float(self._epoch), "data/skipped_prompts": float(self._skipped)} | bad

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to resume at the next prompt; plain JSON."""
        return {
            "source": self._config.source,
            "rows": self.num_rows,
            "seed": self._seed,
            "digest": self.rows.digest,
            "epoch": self._epoch,
            "position": self._position,
            "skipped": self._skipped,
        }

    def find_other_order(self, state: Mapping[str, Any]) -> str:
        """Return why prompts would come in another order than in the run whose `state_dict` is ``state``; "" if they
        would not."""
        digest, source = state.get("digest"), self._config.source
        if state["seed"] != self._seed:
            return f"the saved run had run.seed={state['seed']}, this one has {self._seed}"
        if state["rows"] != self.num_rows:
            keys = "data.source, data.rows, data.bad_rows, run.eval_prompts" if digest else "data.rows"
            return f"the saved run had rows={state['rows']} in an epoch, this one has {self.num_rows} ({keys})"
        if digest not in (None, self.rows.digest) or (digest is None and state["source"] != source):
            return f"data.source={source!r} has other content than in the saved run, {state['source']!r}"
        return ""

    def load_state_dict(self, state: Mapping[str, Any], other_order: bool = False) -> None:
        """Resume where `state` was taken. ``other_order``: at the same position of the same epoch, even if its prompts
        are others; else raise ValueError if they are."""
        if not other_order and (why := self.find_other_order(state)):
            raise ValueError(f"data: cannot resume: {why}")
        self._epoch, self._position, self._skipped = state["epoch"], state["position"], state["skipped"]
        if self._indices is not None:
            self._position = min(self._position, len(self._indices))

    @property
    def num_rows(self) -> int | None:
        """Number of rows of an epoch; None: there is no end to them."""
        return None if self._indices is None else len(self._indices)

    def _choose_rows(self) -> Sequence[int] | None:
        """Return the rows of an epoch; None: there is no end to them. Raise ValueError if the file has fewer than
        `data.rows`."""
        indices, wanted = self.rows.indices, self._config.rows
        if wanted is None:
            return indices
        if indices is None:
            return range(wanted)
        if wanted > len(indices):
            raise ValueError(
                f"data.rows={wanted}: data.source={self._config.source!r} has {len(indices)} rows to train on"
            )
        return indices[:wanted]

    def _advance(self) -> tuple[int, int]:
        """Move to the next prompt and return its (epoch, row)."""
        indices = self._indices
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
        return self._encode([id_ for id_, _ in drawn], [self.rows.row(index) for _, index in drawn])

    def _fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if len(prompt.ids) <= self._config.max_prompt_length]

    def _encode(self, ids: Sequence[str], rows: Sequence[Row]) -> list[Prompt]:
        if not rows:
            return []
        texts = [self.template.render(row.prompt) for row in rows]
        encoded = self.template.tokenize(texts)
        return [
            Prompt(
                id=id_,
                ids=tuple(tokens),
                text=row.prompt if isinstance(row.prompt, str) else text,
                answer=row.answer,
                fields=row.fields,
                prefill=self.template.prefill_of(text),
                chat=[] if isinstance(row.prompt, str) else row.prompt,
            )
            for id_, tokens, row, text in zip(ids, encoded, rows, texts, strict=True)
        ]

    def _check(self, rows: Sequence[Row]) -> list[int | ValueError]:
        """Return the number of tokens of each prompt; the error of one that cannot be rendered or tokenized, or has no
        token, or whose text or answer is no Unicode."""
        sizes: list[int | ValueError] = [self._length_of(row) for row in rows] if len(rows) == 1 else []
        if len(rows) > 1:
            try:
                sizes = [len(ids) for ids in self.template.tokenize([self.template.render(row.prompt) for row in rows])]
                "".join(row.answer for row in rows).encode()
            except EndlessTemplate:
                raise
            except ValueError:
                sizes = [self._length_of(row) for row in rows]
        return [length if length != 0 else ValueError("the prompt has no token") for length in sizes]

    def _length_of(self, row: Row) -> int | ValueError:
        try:
            text = self.template.render(row.prompt)
            text.encode(), row.answer.encode()
            (ids,) = self.template.tokenize([text])
        except UnicodeEncodeError as error:
            return ValueError(f"prompt or answer is not valid Unicode: {error.reason}")
        except EndlessTemplate:
            raise
        except ValueError as error:
            return error
        return len(ids)

    def _open_rows(self, held_out: int) -> Rows:
        config, source = self._config, self._config.source
        if source.endswith(SUFFIXES):
            return FileRows(config, self._seed, self._check, held_out)
        return find_class(source, GENERATORS, key=f"data.source={source}", base=Rows)(config, self._seed)

    def _refuse_long(self) -> None:
        limit = self._config.max_prompt_length
        for name, length in self._lengths():
            if length > limit:
                raise ValueError(
                    f"{name}: a prompt of {length} tokens is longer than data.max_prompt_length={limit}; "
                    "increase it, or skip such prompts with data.long_prompts=skip"
                )

    def _lengths(self) -> Iterator[tuple[str, int]]:
        """Yield name and number of tokens of every prompt of a file, and of the longest of a generator."""
        rows, longest = self.rows, self.rows.longest()
        yield from ((rows.name(index), length) for index, length in zip(rows.usable, rows.lengths, strict=True))
        prompts = self._encode([name for name, _ in longest], [row for _, row in longest])
        yield from ((prompt.id, len(prompt.ids)) for prompt in prompts)


def solution_ids(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens of a correct response with the end token, for supervised warm-up; only for generators."""
    ids = tokenizer(prompt.fields["solution"], add_special_tokens=False)["input_ids"]
    return (*ids, tokenizer.eos_token_id)
