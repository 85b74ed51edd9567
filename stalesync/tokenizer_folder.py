"""Load the tokenizer of a model folder, and check it before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.model import ModelConfig


def load_tokenizer(folder: str, model: ModelConfig) -> Any:
    """Loads the tokenizer of a model folder.

    Raises:
        ValueError: the folder has no tokenizer (transformers would then make one up for some models), one that cannot
            be loaded, or one with more tokens than the model's vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise many types, some of them plain `Exception`
        raise ValueError(f"model.path: {folder} has no tokenizer that transformers can load: {error}") from error
    files = {*type(tokenizer).vocab_files_names.values()} or {"tokenizer_config.json"}
    if not any((Path(folder) / name).is_file() for name in files):
        expected = ", ".join(sorted(files))
        raise ValueError(f"model.path: {folder} has no tokenizer; expected at least one of the files {expected}")
    num_tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
    if num_tokens > model.vocab_size:
        raise ValueError(
            f"model.path: the tokenizer of {folder} has {num_tokens} tokens, the model vocab_size={model.vocab_size}"
        )
    return tokenizer


def end_token_ids(tokenizer: Any, model: ModelConfig, folder: str, turn_end: int | None = None) -> tuple[int, ...]:
    """Returns the tokens that end a response: those of `generation_config.json` or `config.json`, the tokenizer's, and
    the one with which its chat template ends a turn.

    Raises:
        ValueError: one of them is not in the model's vocabulary, so that no response could end with it.
    """
    own = [id for id in (tokenizer.eos_token_id, turn_end) if id is not None]
    ends = tuple(dict.fromkeys((*model.eos_token_ids, *own)))
    if outside := [id for id in ends if not 0 <= id < model.vocab_size]:
        raise ValueError(
            f"model.path: {folder} names the end token {outside[0]} (eos_token_id); expected one below "
            f"vocab_size={model.vocab_size}"
        )
    return ends
