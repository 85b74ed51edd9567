"""A character-level tokenizer for the built-in generators, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS = "<pad>", "<eos>"
PLACES = "abcdefghij"
VOCABULARY = (PAD, EOS, *"0123456789", *PLACES, *"+-*=,;:#> ")
"""32 tokens: a power of two, divisible by the usual tensor-parallel sizes."""


def make_tokenizer(folder: str | Path | None = None) -> Any:
    """Create the tokenizer (a `PreTrainedTokenizerFast`: one token per character, `<pad>` 0, `<eos>` 1, no begin
    token), and save it to `folder` if given; `AutoTokenizer.from_pretrained(folder)` loads it.

    There is no unknown token: encoding a character outside the vocabulary raises an exception.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if folder is not None:
        tokenizer.save_pretrained(str(folder))
    return tokenizer
