"""The reward model against transformers' own, in several layouts; samples for another tokenizer."""

import pytest
import torch

from fusion.colocate.frozen.retokenize import Retokenizer, same_tokenizer
from fusion.colocate.frozen.scoring import sequence_scores
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from stalesync.prompts import make_tokenizer
from tests.colocate.cards import tiny_reward_model
from tests.helpers import run_ranks

LENGTHS = (3, 17, 1, 8, 30, 5, 5)


def samples():
    random = torch.Generator().manual_seed(3)
    return [torch.randint(2, 32, (length,), generator=random) for length in LENGTHS]


def scores_of(rank, device, path, parallel):
    mesh = Mesh.create(parallel)
    model = Transformer(ModelConfig.from_hf(path), mesh, device)
    load_weights(model, path)
    mine = samples()[mesh.dp_rank :: parallel.dp]
    return sequence_scores(model, mine, token_budget=20)


@pytest.mark.parametrize(
    ("experts", "world", "shape"),
    [(False, 2, {"tp": 2}), (False, 4, {"tp": 2}), (True, 4, {"tp": 2, "ep": 2}), (True, 4, {"ep": 2, "etp": 2})],
)
def test_a_score_is_that_of_transformers_in_every_layout(tmp_path, experts, world, shape):
    from transformers import AutoModelForSequenceClassification

    path, parallel = tiny_reward_model(tmp_path, experts), Parallel(world, **shape)
    theirs = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        expected = [theirs(ids[None]).logits.item() for ids in samples()]
    assert max(expected) - min(expected) > 0.1
    found = run_ranks(scores_of, world, path, parallel)
    for rank, scores in enumerate(found):
        assert scores == pytest.approx(expected[parallel.coordinate("dp", rank) :: parallel.dp], abs=1e-4)


def _words(folder, words, eos):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, unk_token="?").save_pretrained(folder)
    return str(folder)


def test_samples_pass_as_they_are_where_both_speak_alike(tmp_path):
    make_tokenizer(tmp_path / "policy")
    make_tokenizer(tmp_path / "same")
    other = _words(tmp_path / "other", ["?", "<end>", "=", "+", *"0123456789"], "<end>")
    assert same_tokenizer(str(tmp_path / "policy"), str(tmp_path / "same"))
    assert same_tokenizer(str(tmp_path / "policy"), str(tmp_path / "nothing"))
    assert not same_tokenizer(str(tmp_path / "policy"), other)


def test_samples_are_tokenised_again_for_another_tokenizer(tmp_path):
    policy = make_tokenizer(tmp_path / "policy")
    other = _words(tmp_path / "other", ["?", "<end>", "=", "+", *"0123456789"], "<end>")
    retokenize = Retokenizer(str(tmp_path / "policy"), other)
    prompt, response = policy("1+2=")["input_ids"], policy("3")["input_ids"]
    assert retokenize(prompt, response) == [5, 3, 6, 2, 7]
    assert retokenize(prompt, [*response, policy.eos_token_id]) == [5, 3, 6, 2, 7, 1], "its own end token"
    (second,) = policy("#")["input_ids"]
    other_end = Retokenizer(str(tmp_path / "policy"), other, [second])
    assert other_end(prompt, [*response, second])[-1] == 1 and retokenize(prompt, [*response, second])[-1] != 1
