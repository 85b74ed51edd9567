"""The config group `data`."""

from __future__ import annotations

from dataclasses import dataclass

from stalesync.prompts.tokenizer import PLACES

GENERATORS = ("addition", "worked_arithmetic")
SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_TERMS = 4


@dataclass
class DataConfig:
    """Where prompts come from. `validate()` raises `ValueError` naming the key."""

    source: str = "addition"
    """`addition` (one digit), `worked_arithmetic` (long answers with their working), or a .jsonl or .parquet file."""

    prompt_field: str = "prompt"
    """Field of the file that holds the prompt: a text, or a list of chat messages (`role`, `content`)."""

    answer_field: str = "answer"
    """Field of the file that holds the reference answer, which the reward is given."""

    prompts_per_step: int = 64
    """Prompts of one step; each is answered by a group of responses."""

    max_prompt_length: int = 512
    """Longest prompt in tokens, chat template included."""

    long_prompts: str = "refuse"
    """What a longer prompt does: `refuse` stops before the run starts and names the row, `skip` leaves it out, counted
    in `data/skipped_prompts`."""

    chat_template: str = "auto"
    """`auto` puts the prompt into the tokenizer's chat template where it has one, `never` leaves the prompt as it
    is."""

    min_digits: int = 2
    """`worked_arithmetic`: digits of each number, at least."""

    max_digits: int = 4
    """`worked_arithmetic`: digits of each number, at most; a digit more makes the answer to a sum of two 19 tokens
    longer, and 5 for every further number."""

    max_terms: int = 2
    """`worked_arithmetic`: numbers added up, between 2 and this many."""

    def validate(self) -> None:
        if self.source not in GENERATORS and not self.source.endswith(SUFFIXES):
            expected = ", ".join((*GENERATORS, "a path ending in " + " or ".join(SUFFIXES)))
            raise ValueError(f"data.source={self.source!r}: expected {expected}")
        for key, least in (("prompts_per_step", 1), ("max_prompt_length", 1), ("min_digits", 1)):
            value = getattr(self, key)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"data.{key}={value!r}: expected a whole number of at least {least}")
        if not self.min_digits <= self.max_digits <= len(PLACES):
            allowed = f"between data.min_digits={self.min_digits} and {len(PLACES)}"
            raise ValueError(f"data.max_digits={self.max_digits}: expected {allowed}")
        if not 2 <= self.max_terms <= MAX_TERMS:
            raise ValueError(f"data.max_terms={self.max_terms}: expected between 2 and {MAX_TERMS}")
        for key, choices in (("long_prompts", ("refuse", "skip")), ("chat_template", ("auto", "never"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"data.{key}={getattr(self, key)!r}: expected one of {', '.join(choices)}")
        if not self.prompt_field or not self.answer_field:
            raise ValueError("data.prompt_field and data.answer_field: expected the name of a field")
