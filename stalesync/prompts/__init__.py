"""Read or generate prompts, order them, and tokenize them.

    addition        one-digit sums, a+b=                   ┐
    worked          many-digit sums, every step written    │
    calculator      sums for the environment's tool        ├─ rows: prompt, answer, fields
    guess           games of the environment               │
    files           JSON Lines, JSON, Parquet; chats       ┘
                                                           │ order: seeded, endless, resumable
    tokenizer       characters of the generators           ▼
                    (or the model's own)  ──────►  PromptSource.next(n) ─► Prompt(id, ids, text, answer, fields)

Every row of a file is read, rendered and tokenized before the run starts. One that cannot be used is refused by name,
or skipped and counted (`data.bad_rows`); likewise a prompt longer than `data.max_prompt_length` (`data.long_prompts`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
