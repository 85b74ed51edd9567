"""Folders that transformers would load otherwise than we do, or not at all, are refused with file and field."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion.model import Mesh, ModelConfig, Transformer, check_folder, load_weights, save_folder
from fusion.model import folder as folder_module
from fusion.model.families import FAMILIES
from fusion.model.hf_fields import INERT
from fusion.npu import open_device
from tests import machine
from tests.families import family_fields
from tests.helpers import TINY, TINY_EXPERTS, tiny_checkpoint

KINDS = {"qwen3": TINY, "qwen3_moe": TINY | TINY_EXPERTS}
EXPORT_ONLY = {"id2label", "num_labels"}
"""Of a classifier"""


def class_of(kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests import pangu_reference  # noqa: F401, registers it

    return CONFIG_MAPPING[kind]


def as_tokens(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def another(value: Any) -> Any:
    """A value of the same type that is not this one, and switches something on."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.5
        case str():
            return value + "x"
        case list():
            return ["sliding_attention"]
        case dict():
            return {"factor": 4.0}
    return 3


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_that_transformers_knows_is_read_refused_or_inert(kind: str) -> None:
    """A field that a later transformers adds to these classes fails here until somebody has looked at it."""
    base = family_fields(kind)
    config = ModelConfig.from_hf(dict(base))
    for name, default in class_of(kind)().to_dict().items():
        if name in INERT | EXPORT_ONLY | FAMILIES[kind].inert:
            continue
        changed = base | {name: another(base.get(name, default))}
        if name == "num_local_experts":
            changed.pop("num_experts", None)
        try:
            assert ModelConfig.from_hf(changed) != config, name
        except ValueError as error:
            assert name in str(error) or name == "model_type"


SIZED = ("vocab", "hidden", "interm", "num_", "moe_interm", "shared_expert_interm", "n_routed")
UNSIZED = {"num_dense_layers", "num_shared_experts"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_fields_are_what_transformers_takes_them_for(kind: str) -> None:
    fields = family_fields(kind).items()
    sizes = {name: value for name, value in fields if name.startswith(SIZED) and name not in UNSIZED}
    config, theirs = ModelConfig.from_hf(sizes | {"model_type": kind}), class_of(kind)(**sizes)
    again = theirs.to_dict() | {"architectures": None}
    assert ModelConfig.from_hf(again) == config
    assert config.pad_token_id == theirs.pad_token_id and config.eos_token_ids == as_tokens(theirs.eos_token_id)
    assert config.rms_norm_eps == theirs.rms_norm_eps and config.tie_embeddings == theirs.tie_word_embeddings
    assert config.max_positions == theirs.max_position_embeddings
    assert config.initializer_range == theirs.initializer_range
    theta = theirs.rope_theta if kind == "pangu_ultra_moe" else theirs.rope_parameters["rope_theta"]
    assert config.attention.rotary.theta == theta
    stated = getattr(theirs, "head_dim", None) or getattr(theirs, "attention_qk_rope_dim", None)
    assert config.to_hf()["head_dim"] == (stated or sizes["hidden_size"] // sizes["num_attention_heads"])
    if hasattr(theirs, "norm_topk_prob"):
        assert config.experts.router.normalise == theirs.norm_topk_prob
    if hasattr(theirs, "router_aux_loss_coef"):
        assert config.router_aux_coef == theirs.router_aux_loss_coef


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "sets rope_scaling.type='dynamic', which is not supported",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "lacks rope_parameters.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8.0}}, "rope_scaling.beta_fast=8.0"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "contradicts itself: rope_parameters=.*, rope_scaling=",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is not supported; supported: 1.0"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers=\[True\]; expected a list of whole numbers"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor=4.0"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "contradicts itself: .*rope_theta"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None, .*; supported: 'fp8'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map="),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"num_local_experts": 16}, "contradicts itself: .*'num_local_experts': 16"),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, "architectures="),
        ({"hidden_size": None}, "config.json: hidden_size=None; expected a whole number above 0"),
        ({"hidden_size": True}, "hidden_size=True; expected a whole number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; expected a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; expected true or false"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id=.*; expected token ids"),
        ({"rope_parameters": 4}, "rope_parameters=4; expected an object"),
        ({"rope_theta": [1e4]}, r"rope_theta=\[10000.0\]; expected a number"),
        ({"layer_types": [{}]}, "layer_types="),
        ({"architectures": 4}, "architectures=4; expected a list of texts"),
        ({"model_type": ["qwen3"]}, "model_type .* is not supported"),
        ({"vocab_size": 10**400}, "vocab_size=.*; expected a whole number above 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
    ],
    ids=str,
)
def test_a_config_that_means_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(KINDS["qwen3_moe"] | {"model_type": "qwen3_moe"} | change)


def test_fields_that_are_off_are_accepted() -> None:
    off = {"quantization_config": None, "rope_scaling": None, "sliding_window": 4096, "num_nextn_predict_layers": 0}
    base = KINDS["qwen3"] | {"model_type": "qwen3"}
    assert ModelConfig.from_hf(base | off | {"layer_types": ["full_attention"] * 2}) == ModelConfig.from_hf(base)


def test_a_field_that_is_missing_is_named() -> None:
    base = KINDS["qwen3"] | {"model_type": "qwen3"}
    base.pop("num_key_value_heads")
    with pytest.raises(ValueError, match="model.path: config.json lacks num_key_value_heads"):
        ModelConfig.from_hf(base)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\xff"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"model.path: .*config.json (cannot be read as JSON|holds a list)"):
        ModelConfig.from_hf(tmp_path)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_head(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    rewritten(folder, change)


def unknown_tensor(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors.update({"model.layers.2.mlp.gate.weight": torch.ones(8, 32)}))


def fp8(folder: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    rewritten(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def both(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of(weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (another_head, "'lm_head.weight', which differs from 'model.embed_tokens.weight'"),
        (unknown_tensor, "holds 'model.layers.2.mlp.gate.weight', which no part of the model"),
        (fp8, "'model.layers.0.mlp.gate.weight' as F8_E4M3; expected one of"),
        (cut_off, "model.safetensors is not a whole safetensors file: .*incomplete"),
        (no_header, "model.safetensors is not a whole safetensors file: .*header"),
        (both, "holds both model.safetensors and model.safetensors.index.json"),
        (index_of(None), "has no weight_map"),
        (index_of({"a": "../other.safetensors"}), "places 'a' in '../other.safetensors'; expected the name of a file"),
        (index_of({"a": "gone.safetensors"}), "gone.safetensors is not a whole safetensors file: .*No such file"),
        (index_of({"a": "model-00001-of-00001.safetensors"}), "'a' in model-00001.*, which does not hold it"),
    ],
    ids=["head", "unknown", "fp8", "cut-off", "no-header", "both", "no-map", "outside", "gone", "not-held"],
)
def test_weights_that_would_be_loaded_wrongly_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    tiny_checkpoint(tmp_path)
    config = ModelConfig.from_hf(tmp_path)
    check_folder(tmp_path, config)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_folder(tmp_path, config)


def test_a_tied_head_that_is_stored_twice_is_accepted(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    check_folder(tmp_path, ModelConfig.from_hf(tmp_path))


def test_frequencies_that_old_checkpoints_store_are_ignored_as_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_checkpoint(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    check_folder(tmp_path, ModelConfig.from_hf(tmp_path))
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded["unexpected_keys"]


@pytest.mark.parametrize("row", [0, 5, 31])
def test_a_tied_head_that_differs_in_one_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row] += 1

    monkeypatch.setattr(folder_module, "CHUNK_ROWS", 4)
    rewritten(Path(tiny_checkpoint(tmp_path)), differ)
    with pytest.raises(ValueError, match="holds 'lm_head.weight', which differs from 'model.embed_tokens.weight'"):
        check_folder(tmp_path, ModelConfig.from_hf(tmp_path))


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path: Path) -> None:
    tensors = load_file(Path(tiny_checkpoint(tmp_path)) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    first, *others = sorted(tensors)
    save_file({first: tensors[first]}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    places = {first: "a.safetensors"} | dict.fromkeys(others, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=f"holds '{first}' in two files"):
        check_folder(tmp_path, ModelConfig.from_hf(tmp_path))


def test_an_export_replaces_the_weights_of_a_folder_and_keeps_the_rest(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, folder = Path(tiny_checkpoint(tmp_path / "in")), tmp_path / "out"
    model = Transformer(ModelConfig.from_hf(source), Mesh.single(), open_device("emulated"), torch.float32)
    load_weights(model, source)
    for shard_bytes, files in ((1 << 30, 1), (30_000, 4), (1 << 30, 1)):
        save_folder(model, folder, shard_bytes=shard_bytes)
        (folder / "README.md").write_text("mine")
        (folder / "mine.bin").write_bytes(b"mine")
        assert len(list(folder.glob("*.safetensors"))) == files or files > 1
        assert (folder / "model.safetensors").is_file() == (files == 1)
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "whoever reads one file reads them all"
        check_folder(folder, ModelConfig.from_hf(folder))
        with torch.no_grad():
            for tensor in model.weights.views.values():
                tensor += 1
    assert (folder / "README.md").read_text() == (folder / "mine.bin").read_text() == "mine"
    assert not list(tmp_path.glob("out.*"))
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()["model.embed_tokens.weight"]
    wanted = load_file(source / "model.safetensors")["model.embed_tokens.weight"] + 2
    torch.testing.assert_close(theirs, wanted)
    (tmp_path / "link").symlink_to(folder)
    save_folder(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (folder / "mine.bin").is_file() and not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize(
    ("stated", "exported"),
    [(None, [4, 30, 31]), ([2, 31], [2, 4, 30, 31]), ("x", [4, 30, 31]), ([7, "x"], [4, 7, 30, 31])],
)
def test_masked_ids_are_exported_and_transformers_generates_none(tmp_path: Path, stated: Any, exported: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = Path(tiny_checkpoint(tmp_path / "in", experts=False))
    generation = {"eos_token_id": 1, "suppress_tokens": stated}
    (source / "generation_config.json").write_text(json.dumps(generation))
    config = replace(ModelConfig.from_hf(source), masked_ids=((4, 5), (30, 32)))
    model = Transformer(config, Mesh.single(), open_device("emulated"), torch.float32)
    load_weights(model, source)
    save_folder(model, tmp_path / "out", tokenizer_from=source)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["suppress_tokens"] == exported
    theirs, prompts = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(2, 18)[:, None]
    tokens = theirs.generate(prompts, do_sample=True, max_new_tokens=20, top_k=0)[:, 1:]
    assert not torch.isin(tokens, torch.tensor(exported)).any()


def test_end_tokens_are_those_that_generate_takes_and_are_exported(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    source = Path(tiny_checkpoint(tmp_path / "in"))
    generation = {"eos_token_id": [1, 7], "pad_token_id": 5, "temperature": 0.6, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    named_once = json.loads((source / "config.json").read_text()) | {"pad_token_id": None}
    (source / "config.json").write_text(json.dumps(named_once))
    config = ModelConfig.from_hf(source)
    assert config.eos_token_ids == (1, 7)
    model = Transformer(config, Mesh.single(), open_device("emulated"), torch.float32)
    save_folder(model, tmp_path / "out", tokenizer_from=source)
    assert ModelConfig.from_hf(tmp_path / "out") == config
    exported = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (exported.eos_token_id, exported.pad_token_id, exported.temperature) == ([1, 7], 5, 0.6)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**6), ("num_hidden_layers", 10**9), ("experts", 10**9), ("vocab_size", 10**12)],
)
def test_an_absurd_size_is_refused_within_a_second(kind: str, name: str, value: int) -> None:
    fields = dict(family_fields(kind))
    counts = [
        one for one in ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts") if one in fields
    ]
    if name == "experts" and not counts:
        return
    name = counts[0] if name == "experts" else name
    start_s = time.monotonic()
    with pytest.raises(ValueError, match=f"{name}={value}; expected a whole number above 0, at most "):
        ModelConfig.from_hf(fields | {name: value})
    assert machine.within(time.monotonic() - start_s, 1)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 4096}, {"num_local_experts": 16384}])
def test_a_folder_of_fewer_tensors_than_its_config_states_is_refused_within_a_second(
    tmp_path: Path, change: Any
) -> None:
    folder = Path(tiny_checkpoint(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="config.json states .* tensors; the folder holds"):
        check_folder(folder, ModelConfig.from_hf(folder))
    assert machine.within(time.monotonic() - start_s, 1)
