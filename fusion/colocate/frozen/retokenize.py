"""Convert the policy's samples for a reward model with another tokenizer: decode to text and tokenise again.

If both tokenizers are the same, or the reward model's folder has none, ids are passed unchanged."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fusion.model.tokenizer_files import has_tokenizer


def same_tokenizer(policy: str, reward_model: str) -> bool:
    """Whether both tokenizers have equal vocabularies and end tokens, or the reward model's folder has none."""
    if not has_tokenizer(Path(reward_model)):
        return True
    first, second = _load(policy), _load(reward_model)
    return first.get_vocab() == second.get_vocab() and first.eos_token_id == second.eos_token_id


class Retokenizer:
    """Convert the policy's tokens to the reward model's. Special tokens are left out of the text, as they have no
    meaning there; if the response ends with an end token of the policy, the reward model's own is appended.
    ``end_token_ids``: the policy's, besides its tokenizer's."""

    def __init__(self, policy: str, reward_model: str, end_token_ids: Iterable[int] = ()):
        self._policy, self._model = _load(policy), _load(reward_model)
        self._ends = {self._policy.eos_token_id, *end_token_ids}

    def __call__(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        text = self._policy.decode([*prompt, *response], skip_special_tokens=True)
        tokens = self._model(text)["input_ids"]
        ended = bool(response) and response[-1] in self._ends
        end = self._model.eos_token_id
        return tokens + [end] if ended and end is not None and tokens[-1:] != [end] else tokens


def _load(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
