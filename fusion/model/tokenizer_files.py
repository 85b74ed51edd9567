"""List the files of a folder that belong to its tokenizer. Imports neither torch nor transformers."""

from pathlib import Path

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model*",  # sentencepiece; Mistral's versions end with .v1, .v3, …
    "tiktoken.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "*spiece.model",
    "*sentencepiece*.model",
)
"""Patterns of the files that hold tokens: a folder with a tokenizer has one"""

OTHERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",  # never run here, but other programs may need it
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer's files, relative to ``folder``."""
    paths = {path.relative_to(folder) for pattern in (*VOCABULARIES, *OTHERS) for path in folder.glob(pattern)}
    return sorted(path for path in paths if (folder / path).is_file())


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the tokens of a tokenizer."""
    return any(path.is_file() for pattern in VOCABULARIES for path in folder.glob(pattern))
