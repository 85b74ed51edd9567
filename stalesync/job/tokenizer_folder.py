"""Load the tokenizer of a model folder, and check it before the run starts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion.model import ModelConfig


def load_tokenizer(folder: str, model: ModelConfig) -> Any:
    """Load the tokenizer of a model folder. Raise ValueError if the folder has no tokenizer (transformers would then
    make one up for some models), one that cannot be loaded, or one with more tokens than the model's vocabulary."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # else it may ask, and run code
    except Exception as error:  # transformers and tokenizers raise many types, some of them plain `Exception`
        if code := sorted(path.name for path in Path(folder).glob("tokenization_*.py")):
            raise ValueError(
                f"model.path: the tokenizer of {folder} is code of its own ({code[0]}), which is never run; convert it "
                "once to tokenizer.json (docs/model_family.md#tokenizers-that-are-code)"
            ) from error
        raise ValueError(f"model.path: {folder} has no tokenizer that transformers can load: {error}") from error
    files = {*type(tokenizer).vocab_files_names.values(), "tiktoken.model"}  # any fast tokenizer is converted from it
    if not any((Path(folder) / name).is_file() for name in files):
        expected = ", ".join(sorted(files))
        raise ValueError(f"model.path: {folder} has no tokenizer; expected at least one of the files {expected}")
    if (num_tokens := num_ids(tokenizer)) > model.vocab_size:
        raise ValueError(
            f"model.path: the tokenizer of {folder} has {num_tokens} tokens, the model vocab_size={model.vocab_size}"
        )
    return tokenizer


def num_ids(tokenizer: Any) -> int:
    """Return one more than a tokenizer's largest id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def masked_ids(tokenizer: Any, model: ModelConfig, ends: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the ids of the model's vocabulary that no token has, as ascending ranges [start, stop). End tokens
    (``ends``) are left out: a response must be able to end."""
    known = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *ends}
    core = getattr(tokenizer, "backend_tokenizer", None)  # of two ids with the same token, `get_vocab` has one
    ranges: list[tuple[int, int]] = []
    for id in range(model.vocab_size):
        if id in known or (core is not None and core.id_to_token(id) is not None):
            continue
        start = ranges.pop()[0] if ranges and ranges[-1][1] == id else id
        ranges.append((start, id + 1))
    return tuple(ranges)


def describe_masked(masked: tuple[tuple[int, int], ...], vocab_size: int) -> list[str]:
    """Return a line if ids are masked."""
    total = sum(stop - start for start, stop in masked)
    return [f"model.path: {total} of {vocab_size} ids have no token: they are never sampled"] if total else []


def end_token_ids(tokenizer: Any, model: ModelConfig, folder: str, turn_end: int | None = None) -> tuple[int, ...]:
    """Return the tokens that end a response: those of `generation_config.json` or `config.json`, the tokenizer's, and
    the one with which its chat template ends a turn. Raise ValueError for one that is not in the model's vocabulary."""
    own = [id for id in (tokenizer.eos_token_id, turn_end) if id is not None]
    ends = tuple(dict.fromkeys((*model.eos_token_ids, *own)))
    if outside := [id for id in ends if not 0 <= id < model.vocab_size]:
        raise ValueError(
            f"model.path: {folder} names the end token {outside[0]} (eos_token_id); expected one below "
            f"vocab_size={model.vocab_size}"
        )
    return ends
