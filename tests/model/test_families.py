"""Every family: what its config says is what transformers computes, and what is written is what was read."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fusion.model import (
    Mesh,
    ModelConfig,
    PackedAttention,
    Parallel,
    Transformer,
    check_folder,
    global_params,
    load_weights,
    local_params,
    moe,
    plan_units,
    save_folder,
)
from fusion.model.families import FAMILIES
from fusion.model.families.pangu import OTHER_NAMES
from fusion.model.rotary import inverse_frequencies
from fusion.npu import open_device
from fusion.npu.operators import Plain
from fusion.npu.operators.gating import score
from tests.ep_switch.oracle import grids
from tests.families import (
    KINDS,
    LLAMA3,
    MLA,
    YARN,
    family_checkpoint,
    family_config,
    family_fields,
    family_hf,
    random_fields,
)
from tests.helpers import run_ranks
from tests.model.test_layouts import LENGTHS, logits_and_export, packed

WORLDS = [
    Parallel(2, tp=2),
    Parallel(2, ep=2),
    Parallel(8, tp=2, ep=2, pp=2),
    Parallel(4, tp=4, ep=2),
    Parallel(4, ep=4),
]


def expected_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits[0] for ids in packed()[0].split(LENGTHS)])


def gradient_norm(model: Any, logits: torch.Tensor) -> float:
    """Of all parameters but the embedding and the head, for a fixed function of the logits."""
    random = torch.Generator().manual_seed(3)
    (logits * torch.randn(logits.shape, generator=random).to(logits.device)).sum().backward()
    ends = ("embed", "model.embed_tokens.weight", "lm_head", "lm_head.weight")
    grads = [p.grad for name, p in model.named_parameters() if p.grad is not None and not name.startswith(ends)]
    return float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())


def assert_loads_again(folder: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    torch.testing.assert_close(expected_logits(again), expected_logits(model), atol=1e-5, rtol=1e-5)


def test_every_family_is_tested() -> None:
    assert {*KINDS} == {*FAMILIES}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3)
@given(data=st.data())
def test_random_models_compute_what_transformers_does(kind: str, data: st.DataObject) -> None:
    check_random_model(kind, data)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(data=st.data())
def test_many_random_models_compute_what_transformers_does(kind: str, data: st.DataObject) -> None:
    check_random_model(kind, data)


def check_random_model(kind: str, data: st.DataObject) -> None:
    """Logits and gradients of a trainer, logits by an engine's operators, the folder read and written, the config."""
    fields = data.draw(random_fields(kind))
    theirs = family_hf(fields)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder / "in")
        config = ModelConfig.from_hf(folder / "in")
        assert config == ModelConfig.from_hf(fields)
        assert config == ModelConfig.from_hf(config.to_hf())
        check_folder(folder / "in", config)
        ours = Transformer(config, Mesh.single(), open_device("emulated"), bucket_bytes=20000)
        load_weights(ours, folder / "in")
        wanted = expected_logits(theirs)
        place = ours.device.torch_device
        ids, positions = (tensor.to(place) for tensor in packed())
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                logits = ours.head.logits(ours(ids, positions, PackedAttention(LENGTHS, Plain()))).cpu()
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        save_folder(ours, folder / "out")
        assert_loads_again(folder / "out", theirs)
        found = gradient_norm(ours, ours.head.logits(ours(ids, positions, PackedAttention(LENGTHS, Plain()))))
        theirs_logits = torch.cat([theirs(ids[None]).logits[0] for ids in packed()[0].split(LENGTHS)])
        assert found == pytest.approx(gradient_norm(theirs, theirs_logits), rel=1e-4)


@given(
    theta=st.sampled_from([1e4, 5e5]),
    factor=st.sampled_from([2.0, 8.0, 32.0]),
    low=st.sampled_from([0.5, 1.0]),
    high=st.sampled_from([2.0, 4.0]),
    positions=st.sampled_from([64, 1000, 8192]),
)
def test_llama3_frequencies_are_bitwise_those_of_transformers(
    theta: float, factor: float, low: float, high: float, positions: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = LLAMA3 | dict(
        rope_theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=positions,
    )
    rotary = family_config("llama", head_dim=64, rope_parameters=stated).attention.rotary
    theirs = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=stated)
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    assert torch.equal(inverse_frequencies(rotary), wanted) and rotary.attention_factor == attention_factor


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


def fits(kind: str, parallel: Parallel) -> bool:
    try:
        parallel.check(family_config(kind), "parallel")
    except ValueError:
        return False
    return True


DEFAULT = {
    ("olmoe", 0),
    ("qwen2_moe", 0),
    ("glm4_moe", 0),
    ("mixtral", 1),
    ("llama", 0),
    ("deepseek_v2", 0),  # queries without a latent
    ("deepseek_v3", 2),
    ("deepseek_v3", 3),
    ("pangu_ultra_moe", 0),
}
"""The cases of the default run: each kind of layer in the layouts that cut it."""


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        pytest.param(kind, parallel, marks=() if (kind, i) in DEFAULT else pytest.mark.extended)
        for kind in KINDS
        for i, parallel in enumerate(WORLDS)
        if fits(kind, parallel)
    ],
    ids=str,
)
def test_logits_and_export_in_layouts(kind: str, parallel: Parallel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint(kind)).eval()
    results = run_ranks(logits_and_export, parallel.world, parallel, checkpoint(kind), str(tmp_path))
    for logits in [logits for logits in results if logits is not None]:
        torch.testing.assert_close(logits, expected_logits(theirs), atol=1e-4, rtol=1e-4)
    assert_loads_again(tmp_path, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_names_what_transformers_saves(kind: str) -> None:
    with safe_open(Path(checkpoint(kind)) / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert saved == global_params(family_config(kind))


@given(kind=st.sampled_from([*KINDS]), data=st.data(), max_numel=st.sampled_from([None, 100, 700]))
def test_every_layout_covers_every_tensor_and_keeps_experts_apart(
    kind: str, data: st.DataObject, max_numel: int | None
) -> None:
    config = ModelConfig.from_hf(data.draw(random_fields(kind)))
    parallel = data.draw(st.sampled_from(grids(config, 8)))
    covered = {name: np.zeros(shape, int) for name, shape in global_params(config).items()}
    for rank in range(parallel.world):
        table = local_params(config, parallel, rank, max_numel)
        for param in table:
            tiled = np.zeros(param.shape, int)
            for part in param.parts:
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
                tiled[tuple(slice(*span) for span in part.local)] += 1
            assert (tiled == 1).all(), param.name
            assert param.expert == all(".experts." in part.name for part in param.parts)
        for unit in plan_units(table, 4, 4096):
            owners = {part.name.split(".experts.")[0] for param, _ in unit.entries for part in param.parts}
            experts = {
                part.name.split(".experts.")[1].split(".")[0]
                for param, _ in unit.entries
                for part in param.parts
                if ".experts." in part.name
            }
            assert len(experts) <= 1 and (not experts or len(owners) == 1)
    for name, count in covered.items():
        assert (count >= 1).all(), name


def test_an_appended_predictor_is_dropped_as_transformers_does(tmp_path: Path) -> None:
    family_checkpoint(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    check_folder(tmp_path, ModelConfig.from_hf(tmp_path))
    save_file(
        tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match="model.layers.4.eh_proj.weight"):
        check_folder(tmp_path, ModelConfig.from_hf(tmp_path))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096, which is not supported; supported: None"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0, .* above low_freq"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "lacks rope_parameters.low_freq_factor"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("olmoe", {"head_dim": 16}, "head_dim=16, which is not supported; supported: 8"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "leaves no sparse layer"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "leaves no sparse layer"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 does not cut n_routed_experts=8"),
        ("glm4_moe", {"n_group": 8}, "n_group=8 does not cut n_routed_experts=8"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group=1 of n_group=4 groups hold fewer"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "rotate 3 channels; expected an even number"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc', .* supported: 'greedy', 'group_limited"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", {"n_group": 3}, "n_group=3 does not cut n_routed_experts=8 into equal groups of one or more"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_attention_heads=4 and num_key_value_heads=2 differ"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"head_dim": 20}, "head_dim=20, which is not supported; supported: 8"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"first_k_dense_replace": 4}, "first_k_dense_replace=4 leaves no sparse layer"),
        ("pangu_ultra_moe", {"num_dense_layers": 4}, "num_dense_layers=4 leaves no sparse layer"),
        ("pangu_ultra_moe", {"attention_qk_rope_dim": 7}, "attention_qk_rope_dim=7; expected an even number"),
        ("pangu_ultra_moe", {"attention_v_dim": 0}, "attention_v_dim=0; expected a whole number above 0"),
        ("pangu_ultra_moe", {"v_head_dim": 13}, "contradicts itself: {'attention_v_dim': 12, 'v_head_dim': 13}"),
        ("pangu_ultra_moe", {"rope_scaling": YARN}, "no 'yarn' rotary embedding"),
        ("pangu_ultra_moe", {"param_sink_number": 128}, "param_sink_number=128"),
        ("pangu_ultra_moe", {"use_mhc": True}, "use_mhc=True"),
    ],
    ids=str,
)
def test_what_a_family_does_not_support_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_config(kind, **change)


def test_both_generations_of_names_of_a_pangu_config_are_read_and_written() -> None:
    fields = family_fields("pangu_ultra_moe")
    later = {OTHER_NAMES.get(name, name): value for name, value in fields.items()}
    config = ModelConfig.from_hf(fields)
    assert ModelConfig.from_hf(later) == ModelConfig.from_hf(fields | later) == config
    written = config.to_hf()
    assert all(written[name] == written[other] == later[name] for other, name in OTHER_NAMES.items())


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    fields = family_fields("deepseek_v3")
    published = fields | {"model_type": "kimi_k2", "topk_method": "noaux_tc", "auto_map": {"AutoModel": "m.M"}}
    config = ModelConfig.from_hf(published)
    assert config == ModelConfig.from_hf(fields)
    assert config.to_hf()["model_type"] == "deepseek_v3"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in MLA or kind == "glm4_moe"])
def test_routers_of_bfloat16_models_have_float32_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' have: nearly tied experts would be swapped otherwise."""
    model = Transformer(family_config(kind), Mesh.single(), open_device("emulated"), torch.bfloat16)
    seen = []
    monkeypatch.setattr(moe, "score", lambda logits, *rest: seen.append(logits.dtype) or score(logits, *rest))
    ids, positions = (tensor.to(model.device.torch_device) for tensor in packed())
    model(ids, positions, PackedAttention(LENGTHS, Plain()))
    assert {*seen} == {torch.float32}
