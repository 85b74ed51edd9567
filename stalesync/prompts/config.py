"""The config group `data`."""

from dataclasses import dataclass
from typing import Any

from fusion.telemetry.classes import OWN_CLASS
from fusion.telemetry.keys import key
from fusion.telemetry.validation import Checks, Group
from stalesync.prompts.tokenizer import PLACES

GENERATORS = {
    "addition": "stalesync.prompts.addition:AdditionRows",
    "worked_arithmetic": "stalesync.prompts.worked:WorkedRows",
    "counting": "stalesync.prompts.counting:CountingRows",
    "calculator": "stalesync.prompts.calculator:CalculatorRows",
    "guess": "stalesync.prompts.guess:GuessRows",
}
"""Module and class of each generator of prompts"""
SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_TERMS, MAX_COUNTED = 4, 1 << 17
SUMS = {"source": ("worked_arithmetic", "calculator")}
DIGITS = {"source": (*SUMS["source"], "counting")}


@dataclass
class DataConfig(Group, path="data"):
    """Where prompts come from."""

    source: str = ""
    """Required: a .jsonl, .json (an array of rows) or .parquet file, or a generator: `addition` (one-digit sums),
    `worked_arithmetic` (long answers with their working), `counting` (answers of any length), `calculator` or `guess`
    (for the environments of these names), or your own as `module:Class` (docs/data.md)."""
    prompt_field: str = "prompt"
    """Field of the file with the prompt: a text, or a list of chat messages (`role` and `content`, or `from` and
    `value` as in ShareGPT's files) that ends with the user's. `a.b` is the field `b` of an object `a`."""
    answer_field: str = "answer"
    """Field of the file with the reference answer (also nested: `reward_model.ground_truth`), which is passed to the
    reward function as text: a number or list of a JSON file as it is written there. The other fields are passed by
    name, except for ones that are called prompt, response or answer."""
    bad_rows: str = key("refuse", one_of=("refuse", "skip"))
    """What happens to a row of the file that cannot be used (no valid JSON, no prompt, an image in a chat, a chat that
    the template refuses, …): `refuse`: an error before the run starts names it; `skip`: it is skipped and counted in
    `data/bad_rows`."""
    rows: int | None = key(None, at_least=1, read_by="simulate")
    """Number of rows that an epoch has: the first ones of the file or of the generator's endless rows; null: all of
    them."""
    prompts_per_step: int = key(64, at_least=1, at_most=1_000_000, read_by="plan simulate")
    """Number of prompts per step; each gets a group of responses."""
    max_prompt_length: int = key(512, at_least=1, read_by="plan simulate")
    """Maximum number of tokens of a prompt, chat template included."""
    long_prompts: str = key("refuse", one_of=("refuse", "skip"))
    """What happens to a longer prompt: `refuse`: an error before the run starts names the row; `skip`: it is skipped
    and counted in `data/skipped_prompts`."""
    chat_template: str = key("auto", one_of=("auto", "never"))
    """`auto`: apply the chat template of the tokenizer if it has one; `never`: use the prompt as it is."""
    chat_template_kwargs: Any = None
    """Variables for the chat template, such as `{enable_thinking: false}`; only ones that the template reads. null:
    none."""
    system_prompt: str | None = None
    """Text of a system message, put before every chat that does not begin with one; null: none."""
    min_digits: int = key(2, at_least=1, only=SUMS, refused=False)
    """`worked_arithmetic`, `calculator`: minimum number of digits of a number."""
    max_digits: int = key(4, at_least=1, only=DIGITS, refused=False)
    """`worked_arithmetic`, `calculator`: maximum number of digits of a number, at most 10; in the former each digit
    adds 19 tokens to the answer of a sum of two numbers, and 5 more for each further number. `counting`: number of
    digits that are asked for, each of which is a token, at most 131072."""
    max_terms: int = key(2, at_least=2, at_most=MAX_TERMS, only=SUMS, refused=False)
    """`worked_arithmetic`, `calculator`: maximum number of terms in a sum; the minimum is 2."""

    def check_source(self) -> None:
        """Raise ValueError unless the source is stated, and may be a generator or a file."""
        generates = self.source in GENERATORS or OWN_CLASS.fullmatch(self.source) is not None
        paths = "a path ending in " + " or ".join(SUFFIXES)
        groups = "(data=file data.source=FILE, data=addition, worked, counting, calculator or guess)"
        known = generates or self.source.endswith(SUFFIXES)
        Checks("data", self).that("source", known, ", ".join((*GENERATORS, f"{paths} {groups}", "module:Class")))

    def check(self, check: Checks) -> None:
        if self.source:  # `Config.validate` requires it; a simulation needs none
            self.check_source()
        if self.source == "counting":
            check.that("max_digits", self.max_digits <= MAX_COUNTED, f"at most {MAX_COUNTED}")
        else:
            digits = self.min_digits <= self.max_digits <= len(PLACES)
            check.that("max_digits", digits, f"between data.min_digits={self.min_digits} and {len(PLACES)}")
        kwargs = self.chat_template_kwargs
        named = kwargs is None or isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)
        check.that("chat_template_kwargs", named, "a mapping such as {enable_thinking: false}, or null")
        check.that("system_prompt", self.system_prompt is None or bool(self.system_prompt.strip()), "a text, or null")
        check.that("prompt_field", bool(self.prompt_field), "the name of a field")
        check.that("answer_field", bool(self.answer_field), "the name of a field")
        check.that("answer_field", self.answer_field != self.prompt_field, "another field than data.prompt_field")
