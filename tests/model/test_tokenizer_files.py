"""An export has every file of its tokenizer: it loads, encodes and decodes as the folder that it was copied from."""

from __future__ import annotations

import base64
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.colocate.frozen.retokenize import same_tokenizer
from fusion.model import Mesh, Transformer, save_folder
from fusion.model.tokenizer_files import has_tokenizer, tokenizer_files
from fusion.npu import open_device
from stalesync.job.tokenizer_folder import load_tokenizer
from stalesync.prompts import make_tokenizer
from tests.helpers import tiny_config

TEXT = "ab ba"


def fast(folder: Path) -> None:
    make_tokenizer(folder)


def byte_pairs(folder: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "<|endoftext|>": 4}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 5}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    settings(folder, tokenizer_class="Qwen2Tokenizer", unk_token="<|endoftext|>")


def word_pieces(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "##a"]))
    settings(folder, tokenizer_class="BertTokenizer")


def sentence_pieces(folder: Path) -> None:
    import sentencepiece

    (folder / "text").write_text("\n".join(["ab ba abba", "a b ab ba", "bab aba"] * 20))
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=12, model_type="bpe"
    )
    (folder / "text").unlink()
    (folder / "tokenizer.vocab").unlink()
    settings(folder, tokenizer_class="LlamaTokenizer")


def ranks(folder: Path) -> None:
    words = [bytes([byte]) for byte in range(256)] + [b"ab", b" ba"]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    settings(folder, tokenizer_class="PreTrainedTokenizerFast")


def settings(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def needs(library: str, make: Any) -> Any:
    missing = importlib.util.find_spec(library) is None
    return pytest.param(make, marks=pytest.mark.skipif(missing, reason=f"pip install {library}"), id=make.__name__)


def exported(folder: Path, target: Path) -> Path:
    model = Transformer(tiny_config(experts=False), Mesh.single(), open_device("emulated"), torch.float32)
    save_folder(model, target, tokenizer_from=folder)
    return target


@pytest.mark.parametrize(
    "make", [fast, byte_pairs, word_pieces, needs("sentencepiece", sentence_pieces), needs("tiktoken", ranks)]
)
def test_an_export_has_the_tokenizer_of_its_source(make, tmp_path):
    source, config = tmp_path / "in", replace(tiny_config(), vocab_size=512)
    source.mkdir()
    make(source)
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    folder = exported(source, tmp_path / "out")
    before, after = (load_tokenizer(str(one), config) for one in (source, folder))
    assert type(after) is type(before) and after.get_vocab() == before.get_vocab()
    text = "1+1" if make is fast else TEXT
    assert after(text)["input_ids"] == before(text)["input_ids"] and len(before(text)["input_ids"]) > 1
    assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert same_tokenizer(str(source), str(folder))


def test_every_file_of_a_tokenizer_is_exported_and_nothing_else(tmp_path):
    source = tmp_path / "in"
    (source / "additional_chat_templates").mkdir(parents=True)
    ours = """added_tokens.json additional_chat_templates/rag.jinja additional_chat_templates/tool_use.jinja
        chat_template.jinja chat_template.json merges.txt qwen.tiktoken sentencepiece.bpe.model special_tokens_map.json
        spiece.model tekken.json tiktoken.model tokenization_kimi.py tokenizer.json tokenizer.model tokenizer.model.v3
        tokenizer_config.json vocab.json vocab.txt""".split()
    for name in (*ours, "model.safetensors", "README.md", "modeling_kimi.py", "training_args.bin"):
        (source / name).write_text(name)
    assert [str(path) for path in tokenizer_files(source)] == ours
    folder = exported(source, tmp_path / "out")
    assert all((folder / name).read_text() == name for name in ours)
    own = {"config.json", "generation_config.json", "model.safetensors"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == own | {*ours}


def test_settings_alone_are_no_tokenizer(tmp_path):
    settings(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    assert not has_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("a")
    assert has_tokenizer(tmp_path)
