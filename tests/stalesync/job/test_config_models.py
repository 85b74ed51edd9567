"""A config that does not fit its models is refused before anything starts, by key."""

import pytest

from tests.colocate.cards import tiny_reward_model
from tests.families import family_checkpoint
from tests.helpers import tiny_checkpoint
from tests.stalesync.job.jobs import job_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


def test_replay_needs_experts(checkpoint, tmp_path):
    for replay in ("train", "rollout"):
        job_of(checkpoint, algorithm__replay=replay).validate()
        dense = job_of(tiny_checkpoint(tmp_path, experts=False), algorithm__replay=replay)
        with pytest.raises(ValueError, match=f"algorithm.replay='{replay}': expected none, as the model is dense"):
            dense.validate()


def test_biases_are_moved_only_where_routers_have_them(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="training.router_bias_rate=0.001: expected 0, as the routers of .* have no"):
        job_of(checkpoint, training__router_bias_rate=0.001).validate()
    corrected = family_checkpoint(tmp_path, "glm4_moe")
    job_of(corrected, training__router_bias_rate=0.001).validate()


def test_a_reward_model_has_one_score(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match="reward.model: .* has no such head; expected a Qwen3ForSequenceClassification"
    ):
        job_of(checkpoint, reward__model=checkpoint).validate()
    two = tiny_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ValueError, match="has a head of 2 labels; expected .* with num_labels=1"):
        job_of(checkpoint, reward__model=two).validate()
    one = tiny_reward_model(tmp_path / "one")
    config = job_of(checkpoint, reward__model=one, fusion__deployment="full")
    config.validate()
    assert config.deployment.reward_model == (0, 1, 2, 3)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_a_worker_starts(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks the tensor 'model.layers.1.mlp.experts.3.up_proj.weight'"):
        job_of(folder).validate()
