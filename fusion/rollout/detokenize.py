"""Decode responses to text on the card that has their tokens.

    tokenizer ─ detokenizer_spec ─► DetokenizerSpec ─ sent to the cards ─► Detokenizer ─► text of a response
    (the controller's)              (folder, end tokens)                   (loaded at the first response)

Only cards that report for an engine have responses, so no other card loads a tokenizer. Importing transformers takes
more than a second of CPU in each process (measured: 1.4 s); where `tokenizer.json` alone decodes as the tokenizer does
(`standalone`), a card loads it by the `tokenizers` library instead, in milliseconds."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"
DECODES = ("model", "decoder", "added_tokens")
"""The parts of a `tokenizer.json` that determine what tokens decode to."""


@dataclass(frozen=True)
class DetokenizerSpec:
    """What a card needs to decode responses: plain data. ``folder``: of the tokenizer, in Hugging Face format;
    ``end_token_ids``: the tokens that end a response; () if there is none; ``standalone``: `tokenizer.json` alone
    decodes to the same text as the tokenizer, to the letter."""

    folder: str
    end_token_ids: tuple[int, ...]
    standalone: bool = False


class Detokenizer:
    """Decode responses; load its tokenizer when it is first called. One thread at a time."""

    def __init__(self, spec: DetokenizerSpec):
        self._spec = spec
        self._decode: Callable[[list[int]], str] | None = None

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return a response as its reward sees it: all tokens, special ones too, but the end token that stopped it."""
        ended = bool(tokens) and tokens[-1] in self._spec.end_token_ids
        return self.decode(tokens[:-1] if ended else tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        if self._decode is None:
            self._decode = _load(self._spec)
        return self._decode(list(tokens))


def detokenizer_spec(folder: str, tokenizer: Any, end_token_ids: tuple[int, ...]) -> DetokenizerSpec:
    """Describe ``tokenizer``, which transformers loaded from ``folder``, for the cards."""
    return DetokenizerSpec(folder, end_token_ids, _is_standalone(folder, tokenizer))


def _is_standalone(folder: str, tokenizer: Any) -> bool:
    """Whether transformers adds nothing to what the `tokenizers` library decodes: no code of a subclass, no clean-up of
    spaces, and the same vocabulary and decoder as in the file."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    path, kind = Path(folder) / TOKENIZER_FILE, type(tokenizer)
    if not (path.is_file() and isinstance(tokenizer, PreTrainedTokenizerFast)):
        return False
    inherited = all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode"))
    if not inherited or tokenizer.clean_up_tokenization_spaces:
        return False
    file, loaded = (json.loads(one.to_str()) for one in (Tokenizer.from_file(str(path)), tokenizer.backend_tokenizer))
    return all(file[part] == loaded[part] for part in DECODES)


def _load(spec: DetokenizerSpec) -> Callable[[list[int]], str]:
    if spec.standalone:
        from tokenizers import Tokenizer

        core = Tokenizer.from_file(str(Path(spec.folder) / TOKENIZER_FILE))
        return lambda tokens: core.decode(tokens, skip_special_tokens=False)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.folder, trust_remote_code=False)
    return lambda tokens: str(tokenizer.decode(tokens))
