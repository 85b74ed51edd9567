"""Read or generate prompts, order them, and tokenize them.

    addition        one-digit sums, a+b=                   ┐
    worked          many-digit sums, every step written    ├─ rows: prompt, answer, fields
    files           JSONL and Parquet                      ┘
                                                           │ order: seeded, endless, resumable
    tokenizer       characters of both generators          ▼
                    (or the model's own)  ──────►  PromptSource.next(n) ─► Prompt(id, ids, text, answer, fields)

A prompt longer than `data.max_prompt_length` is refused before the run starts, or skipped and counted
(`data.long_prompts`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
