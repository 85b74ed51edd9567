"""Character-level tokenizers for the built-in generators, as Hugging Face folders: of texts, and of chats.

    <|user|>12+34=<|end|><|assistant|>CALL 12+34 CALL_END<|end|><|tool|>46<|end|><|assistant|>46<|end|>

In a chat a token is a role, the end of a turn (the end token), a word, or a character: a call of the calculator in the
hermes format has two tokens more than its expression."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, EOS = "<pad>", "<eos>"
PLACES = "abcdefghij"
VOCABULARY = (PAD, EOS, *"0123456789", *PLACES, *"+-*=,;:#> ")
"""32 tokens: a power of two, divisible by the usual tensor-parallel sizes."""
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
WORDS = (CALL, CALL_END, "higher", "lower")
CHAT_VOCABULARY = (PAD, END, *ROLES, *WORDS, "\n", *map(chr, range(32, 127)))
"""106 tokens: `words` and unused ones make 112 of them, 16 times 7"""
MAX_WORDS = 6
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(folder: str | Path | None = None, *, chat: bool = False, words: Sequence[str] = ()) -> Any:
    """Create the tokenizer (a `PreTrainedTokenizerFast`: `<pad>` 0, the end token 1, no begin token), and save it to
    `folder` if given; `AutoTokenizer.from_pretrained(folder)` loads it. ``chat``: of chats, with a template, where each
    of ``words`` (at most `MAX_WORDS`) is one token, too. There is no unknown token: encoding a character outside the
    vocabulary raises an exception."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unused = (f"<|unused{n}|>" for n in range(MAX_WORDS - len(words)))
    vocabulary = (*CHAT_VOCABULARY, *words, *unused) if chat else VOCABULARY
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=None))
    longer = "".join(f"{re.escape(token)}|" for token in vocabulary if len(token) > 1) if chat else ""
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longer}[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END if chat else EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    if folder is not None:
        tokenizer.save_pretrained(str(folder))
    return tokenizer
