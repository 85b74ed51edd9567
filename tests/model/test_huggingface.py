"""Checkpoints against transformers, in one process; other layouts are in test_layouts.py."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion.model import (
    Mesh,
    ModelConfig,
    PackedAttention,
    Routed,
    Transformer,
    load_balancing_loss,
    load_weights,
    save_folder,
)
from fusion.npu import open_device
from fusion.npu.operators import Plain
from tests.helpers import tiny_checkpoint, tiny_hf

VARIANTS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(scope="module")
def device():
    return open_device("emulated")


def _loaded(folder, device, dtype=torch.float32):
    model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device, dtype, bucket_bytes=20_000)
    load_weights(model, folder)
    return model


def _packed(device, *sequences):
    ids = torch.cat(sequences).to(device.torch_device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).to(device.torch_device)
    return ids, positions, PackedAttention([len(sequence) for sequence in sequences], Plain())


@pytest.mark.parametrize(("experts", "tied"), VARIANTS)
def test_logits_equal_transformers(tmp_path, device, experts, tied):
    folder = tiny_checkpoint(tmp_path, experts, tie_word_embeddings=tied)
    reference, model = tiny_hf(experts, tie_word_embeddings=tied), _loaded(folder, device)
    ids = torch.randint(0, 32, (2, 11))
    expected = reference(ids).logits
    found = model.head.logits(model(*_packed(device, ids[0], ids[1], ids[0, :5]))).cpu()
    assert torch.allclose(found[:22].view(2, 11, -1), expected, atol=1e-4)
    assert torch.allclose(found[22:], expected[0, :5], atol=1e-4)


@pytest.mark.parametrize(("experts", "tied"), VARIANTS)
def test_what_is_saved_transformers_loads_bitwise(tmp_path, device, experts, tied):
    from transformers import AutoModelForCausalLM

    model = _loaded(tiny_checkpoint(tmp_path / "in", experts, tie_word_embeddings=tied), device)
    save_folder(model, tmp_path / "out", shard_bytes=30_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file(), "several shards were asked for"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, tensor in tiny_hf(experts, tie_word_embeddings=tied).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert ModelConfig.from_hf(tmp_path / "out") == model.config
    _loaded(tmp_path / "out", device)


def test_load_balancing_loss_equals_transformers(tmp_path, device):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, ids = _loaded(tiny_checkpoint(tmp_path), device), torch.randint(0, 32, (2, 9))
    expected = load_balancing_loss_func(tiny_hf()(ids, output_router_logits=True).router_logits, 8, 2)
    routed: list[Routed] = []
    model(*_packed(device, ids[0], ids[1]), routed)
    stats = [layer.stats for layer in routed]
    found = load_balancing_loss(stats, torch.stack(stats)[:, 0].sum(0), 18 * 2)
    assert abs(found.item() - expected.item()) < 1e-5


def test_batch_invariant_rows_do_not_depend_on_the_batch(tmp_path, device):
    config = ModelConfig.from_hf(tiny_checkpoint(tmp_path))
    model = Transformer(config, Mesh.single(), device, batch_invariant=True)
    load_weights(model, tmp_path)
    sequences = [torch.randint(0, 32, (length,)) for length in (7, 3, 12)]
    with torch.no_grad():
        together = model.head.logits(model(*_packed(device, *sequences))).cpu()
        alone = torch.cat([model.head.logits(model(*_packed(device, one))).cpu() for one in sequences])
    assert torch.equal(together, alone)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path, device):
    tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = tensors.pop(gone)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks the tensor '{gone}'"):
        _loaded(tmp_path, device)
    save_file(tensors | {gone: kept[:5].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{gone}' with shape \[5, 32\]; config.json implies \[32, 32\]"):
        _loaded(tmp_path, device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; expected one of .*'llama'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, r"use_sliding_window=True, .*; supported: False \(docs/model_family.md\)"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type='longrope', .*; supported: .*'yarn'",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type=\['yarn'\], .*; supported: .*'yarn'"),
        ({"mlp_only_layers": [0, 1]}, "leaves no sparse layer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)


def test_no_folder():
    with pytest.raises(ValueError, match="model.path: .*nowhere.* does not exist"):
        ModelConfig.from_hf("nowhere")
    with pytest.raises(ValueError, match="model.path: xxx.*/config.json cannot be read as JSON: .*File name too long"):
        ModelConfig.from_hf("x" * 300)
