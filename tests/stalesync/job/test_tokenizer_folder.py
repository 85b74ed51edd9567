"""The tokenizer of a model folder, checked in a run's first second."""

import json
import shutil

import pytest

from fusion.model import ModelConfig
from stalesync.job.config import Config
from stalesync.job.tokenizer_folder import describe_masked, end_token_ids, load_tokenizer, masked_ids
from stalesync.prepare import warn_if_endless, worker_spec
from stalesync.prompts import make_tokenizer
from tests.helpers import tiny_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, experts=False)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def load(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return load_tokenizer(str(folder), ModelConfig.from_hf(folder))


def test_a_folder_without_a_tokenizer_is_refused(folder):
    assert len(load(folder)) == 32
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=f"model.path: {folder} has no tokenizer"):
        load(folder)


def test_a_tokenizer_config_without_a_vocabulary_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"model.path: {folder} has no tokenizer"):
        load(folder)


def test_a_broken_tokenizer_is_refused_with_its_folder(folder):
    (folder / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match=f"model.path: {folder} has no tokenizer that transformers can load"):
        load(folder)


def test_code_of_a_tokenizer_is_refused_and_never_run(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenization_own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: ...\n")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"is code of its own \(tokenization_own.py\), which is never run; convert it"):
        load(folder)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder):
    with pytest.raises(ValueError, match="has 32 tokens, the model vocab_size=31"):
        load(folder, vocab_size=31)


def test_end_tokens_are_those_of_the_model_and_of_the_tokenizer(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    model, tokenizer = ModelConfig.from_hf(folder), load(folder)
    assert end_token_ids(tokenizer, model, str(folder)) == (3, 7, 1)
    assert end_token_ids(tokenizer, model, str(folder), turn_end=5) == (3, 7, 1, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 32]}))
    with pytest.raises(ValueError, match="names the end token 32 .*; expected one below vocab_size=32"):
        end_token_ids(tokenizer, ModelConfig.from_hf(folder), str(folder))


def test_a_model_without_an_end_token_is_warned_of(folder, caplog):
    (folder / "generation_config.json").unlink()
    tokenizer = load(folder, eos_token_id=None)
    tokenizer.eos_token = None
    config = Config()
    config.model.path = str(folder)
    config = config.resolved()
    spec = worker_spec(config, ModelConfig.from_hf(folder), tokenizer)
    assert spec.detokenizer.end_token_ids == ()
    warn_if_endless(config, spec)
    assert "names no end token (eos_token_id): every response will be rollout.max_response_length=" in caplog.text
    caplog.clear()
    config.rollout.sampling.stop = ["#"]
    warn_if_endless(config, spec)
    assert not caplog.text


def test_ids_without_a_token_are_masked_holes_too_and_end_tokens_are_not(folder):
    path = folder / "tokenizer.json"
    core = json.loads(path.read_text())
    core["model"]["vocab"] = {token: id + 3 * (id > 9) for token, id in core["model"]["vocab"].items()}
    path.write_text(json.dumps(core))
    tokenizer, model = load(folder, vocab_size=48), ModelConfig.from_hf(folder)
    assert masked_ids(tokenizer, model, (1, 40)) == ((10, 13), (35, 40), (41, 48))
    (line,) = describe_masked(((10, 13), (35, 38)), 48)
    assert line == "model.path: 6 of 48 ids have no token: they are never sampled"
    config = Config()
    config.model.path = str(folder)
    spec = worker_spec(config.resolved(), model, tokenizer)
    assert spec.policy().masked_ids == spec.masked_ids == ((10, 13), (35, 48))


def test_of_two_ids_with_the_same_token_neither_is_masked(folder):
    pieces = [["<pad>", 0.0], ["<eos>", 0.0], ["a", -1.0], ["a", -2.0], ["b", -1.0]]
    core = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"model": core}))
    tokenizer, model = load(folder), ModelConfig.from_hf(folder)
    assert 3 not in tokenizer.get_vocab().values() or 2 not in tokenizer.get_vocab().values()
    assert masked_ids(tokenizer, model, ()) == ((5, 32),)


def test_an_added_token_is_one(folder):
    tokenizer = load(folder, vocab_size=48)
    tokenizer.add_tokens(["<tool>"])
    assert masked_ids(tokenizer, ModelConfig.from_hf(folder), ()) == ((33, 48),)


def test_a_whole_vocabulary_masks_no_id_and_says_nothing(folder):
    tokenizer, model = load(folder), ModelConfig.from_hf(folder)
    assert masked_ids(tokenizer, model, ()) == () and describe_masked((), 32) == []
