"""A folder of peft that would compute otherwise is refused, by the field or tensor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion.model.adapters import Adapters
from fusion.model.peft import save_adapter
from fusion.model.peft_folder import CONFIG, WEIGHTS, adapter_params, check_adapter, peft_shapes
from tests.helpers import tiny_config

MODEL = replace(tiny_config(num_hidden_layers=2, mlp_only_layers=[1]), adapters=Adapters(2, 8.0))


@pytest.fixture
def folder(tmp_path):
    tensors = ((name, torch.randn(shape)) for name, shape in adapter_params(MODEL).items())
    save_adapter(MODEL, tensors, tmp_path / "adapter", base="")
    return tmp_path / "adapter"


def test_what_is_written_is_accepted(folder):
    check_adapter(folder, MODEL)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "whoever reads one file reads them all"


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"r": 4}, "r=4; training.lora.rank is 2"),
        ({"lora_alpha": 2}, "lora_alpha=2; training.lora.alpha is 8"),
        ({"peft_type": "IA3"}, "peft_type='IA3'; expected 'LORA'"),
        ({"use_dora": True}, "use_dora=True; expected None"),
        ({"use_rslora": True}, "use_rslora=True; expected None"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}; expected None"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]; expected None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'; expected True"),
        ({"of_a_later_version": 0.5}, "of_a_later_version=0.5; expected None"),
    ],
)
def test_a_field_that_changes_what_is_computed_is_refused(folder, changed, message):
    stated = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(stated | changed))
    with pytest.raises(ValueError, match=f"model.adapter: .*{message}"):
        check_adapter(folder, MODEL)


@pytest.mark.parametrize("fault", ["lacks", "also holds", "shape", "type", "damaged", "missing"])
def test_other_tensors_are_refused(folder, fault):
    tensors, name = load_file(folder / WEIGHTS), next(iter(peft_shapes(MODEL)))
    match fault:
        case "lacks":
            message = f"lacks '{tensors.popitem()[0]}'"
        case "also holds":
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(2, 2)
            message = "also holds 'base_model.model.lm_head.lora_A.weight'"
        case "shape":
            tensors[name], message = torch.zeros(3, 3), rf"holds '{name}' as F32 \[3, 3\]; expected"
        case "type":
            tensors[name], message = tensors[name].to(torch.int8), f"holds '{name}' as I8"
    save_file(tensors, folder / WEIGHTS)
    if fault == "damaged":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:40])
        message = "is not a whole safetensors file"
    elif fault == "missing":
        (folder / WEIGHTS).unlink()
        message = "is not a whole safetensors file"
    with pytest.raises(ValueError, match=f"model.adapter: .*{message}"):
        check_adapter(folder, MODEL)
