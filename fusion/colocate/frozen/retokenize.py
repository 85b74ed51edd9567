"""Samples of the policy for a reward model with another tokenizer: back to text, and tokenised again.

Where both have the same tokens for the same text, ids pass as they are; that is so too where the reward model's folder
holds no tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer_config.json"


def same_tokenizer(policy: str, reward_model: str) -> bool:
    """Whether the two folders' tokenizers have the same vocabulary and the same end token."""
    if not (Path(reward_model) / TOKENIZER_FILE).is_file():
        return True
    mine, theirs = _load(policy), _load(reward_model)
    return mine.get_vocab() == theirs.get_vocab() and mine.eos_token_id == theirs.eos_token_id


class Retokenizer:
    """The policy's tokens as the reward model's. Special tokens are left out of the text, as they mean nothing there;
    where the response ended with the policy's end token, the reward model's own is put behind it."""

    def __init__(self, policy: str, reward_model: str):
        self._policy, self._model = _load(policy), _load(reward_model)

    def __call__(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        text = self._policy.decode([*prompt, *response], skip_special_tokens=True)
        tokens = self._model(text)["input_ids"]
        ended = bool(response) and response[-1] == self._policy.eos_token_id
        end = self._model.eos_token_id
        return tokens + [end] if ended and end is not None and tokens[-1:] != [end] else tokens


def _load(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
