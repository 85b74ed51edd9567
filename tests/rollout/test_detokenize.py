"""Responses become the text that their rewards see, on a card with transformers and on one without."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout.detokenize import Detokenizer, DetokenizerSpec, detokenizer_spec
from stalesync.prompts.tokenizer import make_tokenizer

SIZE = 257


def _byte_level(folder, **options):
    """One token a byte, so that most sequences of tokens are no UTF-8; `<eos>` is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {piece: index + 1 for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE({"<eos>": 0} | alphabet, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", **options).save_pretrained(folder)
    return _load(folder)


def _load(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _text(tokenizer, tokens):
    """What the controller made of a response before cards did."""
    ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
    return tokenizer.decode(list(tokens[:-1] if ended else tokens))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bytes"))
    return folder, _byte_level(folder, clean_up_tokenization_spaces=False)


def test_without_transformers_every_response_is_to_the_letter_what_the_tokenizer_says(byte_level):
    folder, tokenizer = byte_level
    spec = detokenizer_spec(folder, tokenizer, (0,))
    assert spec == DetokenizerSpec(folder, (0,), standalone=True)
    alone, beside = Detokenizer(spec), Detokenizer(DetokenizerSpec(folder, (0,), standalone=False))

    @given(st.lists(st.integers(0, SIZE - 1), max_size=24), st.booleans())
    def same(tokens, ends):
        tokens = [*tokens, 0] if ends else tokens
        assert alone(tokens) == beside(tokens) == _text(tokenizer, tokens)

    same()
    assert alone([0]) == alone([]) == "" and alone([0, 0]) == "<eos>", "only the end token that stopped it is left out"


def test_any_of_the_end_tokens_is_left_out_where_it_ends_the_response(byte_level):
    folder, tokenizer = byte_level
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    detokenize = Detokenizer(detokenizer_spec(folder, tokenizer, (0, b)))
    assert detokenize([a, b]) == detokenize([a, 0]) == "a" and detokenize([b, a]) == "ba"
    assert Detokenizer(detokenizer_spec(folder, tokenizer, ()))([a, 0]) == "a<eos>"


def test_a_card_imports_transformers_only_where_the_file_alone_would_decode_otherwise(tmp_path):
    make_tokenizer(tmp_path)
    spec = detokenizer_spec(str(tmp_path), _load(tmp_path), (1,))
    program = (
        "import sys; from fusion.rollout.detokenize import *\n"
        f"decode = Detokenizer(DetokenizerSpec({spec.folder!r}, {spec.end_token_ids}, {spec.standalone}))\n"
        "assert decode([4, 14, 5, 1])\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_tokenizer_that_cleans_its_text_up_or_is_no_tokenizer_json_is_transformers_own(tmp_path):
    from transformers import ByT5Tokenizer

    cleaned = _byte_level(tmp_path / "cleaned", clean_up_tokenization_spaces=True)
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    for folder, tokenizer in ((tmp_path / "cleaned", cleaned), (tmp_path / "slow", _load(tmp_path / "slow"))):
        spec = detokenizer_spec(str(folder), tokenizer, (tokenizer.eos_token_id,))
        assert not spec.standalone
        response = [*tokenizer.encode("Grüße !", add_special_tokens=False), tokenizer.eos_token_id]
        assert Detokenizer(spec)(response) == _text(tokenizer, response)


def test_a_file_that_decodes_otherwise_than_the_tokenizer_is_not_read_in_its_place(byte_level, tmp_path):
    folder, tokenizer = byte_level
    make_tokenizer(tmp_path)
    assert not detokenizer_spec(str(tmp_path), tokenizer, (0,)).standalone, "the file of another tokenizer"
