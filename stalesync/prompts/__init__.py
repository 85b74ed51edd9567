"""Prompts: where they come from, in which order, as which tokens.

    addition        one-digit sums, a+b=                   ┐
    worked          many-digit sums, working written out   ├─ rows: prompt, answer, fields
    files           JSONL and Parquet                      ┘
                                                           │ order seeded, endless, resumable
    tokenizer       characters of both generators          ▼
                    (or the model's own)  ──────►  PromptSource.next(n) ─► Prompt(id, ids, text, answer, fields)

A prompt longer than `data.max_prompt_length` is refused before the run starts, or skipped and counted, by choice.
"""

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import Row
from stalesync.prompts.source import Prompt, PromptSource, solution_ids
from stalesync.prompts.tokenizer import make_tokenizer

__all__ = ["DataConfig", "Prompt", "PromptSource", "Row", "make_tokenizer", "solution_ids"]
