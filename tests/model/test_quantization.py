"""Checkpoints of float8 matrices with scales of blocks: read bitwise in any box, and refused where they mean more."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fusion.model import Mesh, ModelConfig, Parallel, Transformer, check_folder, load_weights, save_folder
from fusion.model.hf_quantization import BlockScales, scale_of
from fusion.model.huggingface import BoxReader, dequantize
from fusion.model.stored import read_header
from fusion.npu import open_device
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.model.test_layouts import logits_and_export

BLOCK = BlockScales(12, 20)
"""Blocks that divide no matrix of the tiny models"""
STATED = dict(
    quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK.rows, BLOCK.columns]
)


def quantized(matrix: torch.Tensor, block: BlockScales) -> tuple[torch.Tensor, torch.Tensor]:
    """A float8 matrix and its scales, as DeepSeek-V3 quantizes: the largest of a block becomes 448."""
    scales = torch.empty(block.shape(tuple(matrix.shape)))
    values = torch.empty(matrix.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (slice(i * block.rows, (i + 1) * block.rows), slice(j * block.columns, (j + 1) * block.columns))
            scales[i, j] = matrix[box].abs().max().clamp(min=1e-6) / 448
            values[box] = matrix[box] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def quantize_folder(source: str, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with quantized projections of its layers; returns the tensors as they should be read."""
    folder.mkdir(exist_ok=True)
    tensors, stored = load_file(f"{source}/model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and name.endswith("_proj.weight"):
            stored[name], stored[scale_of(name)] = quantized(tensor, BLOCK)
            whole = tuple((0, size) for size in tensor.shape)
            tensors[name] = dequantize(stored[name], stored[scale_of(name)], whole, BLOCK)
        else:
            stored[name] = tensor
    assert len(stored) > len(tensors)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads(Path(source, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": STATED | changes}))
    return tensors


def test_every_float8_value_is_converted_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    found = dequantize(values, torch.ones(1, 1), ((0, 16), (0, 16)), BlockScales(16, 16))
    assert torch.equal(found.nan_to_num(7.5), values.to(torch.float32).nan_to_num(7.5))


@given(data=st.data(), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_every_box_is_read_as_the_whole_matrix_bitwise(data: st.DataObject, rows: int, columns: int) -> None:
    block = BlockScales(data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    matrix = torch.randn(rows, columns, generator=random)
    values, scales = quantized(matrix, block)
    expanded = scales.repeat_interleave(block.rows, 0)[:rows].repeat_interleave(block.columns, 1)[:, :columns]
    whole = values.to(torch.float32) * expanded
    assert ((whole - matrix).abs() <= 0.07 * matrix.abs() + expanded / 256).all(), "not what was quantized"
    region = tuple(
        (start, data.draw(st.integers(start + 1, size)))
        for size in (rows, columns)
        for start in [data.draw(st.integers(0, size - 1))]
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder, "model.safetensors")
        save_file({"a": values, scale_of("a"): scales}, path)
        found = BoxReader(read_header(path), block, stack).read("a", region)
    assert torch.equal(found, whole[tuple(slice(*span) for span in region)])


def test_whole_tensors_equal_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    block = BlockScales(4, 8)
    values, scales = quantized(torch.randn(12, 24), block)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(dequantize(values, scales, ((0, 12), (0, 24)), block), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantized_folder_is_loaded_and_exported_without_quantization(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = quantize_folder(family_checkpoint(tmp_path / "in", "glm4_moe"), tmp_path / "fp8")
    config = ModelConfig.from_hf(tmp_path / "fp8")
    assert config == ModelConfig.from_hf(tmp_path / "in")
    check_folder(tmp_path / "fp8", config)
    model = Transformer(config, Mesh.single(), open_device("emulated"), dtype, bucket_bytes=20000)
    load_weights(model, tmp_path / "fp8")
    save_folder(model, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == wanted.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_rank_reads_its_boxes_of_a_quantized_folder(tmp_path: Path) -> None:
    wanted = quantize_folder(family_checkpoint(tmp_path / "in", "qwen2_moe"), tmp_path / "fp8")
    parallel = Parallel(4, tp=2, ep=2)
    run_ranks(logits_and_export, 4, parallel, str(tmp_path / "fp8"), str(tmp_path / "out"))
    exported = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    assert exported.keys() == wanted.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quantization_config.quant_method='awq', which is not supported; supported: 'fp8'"),
        ({"fmt": "e5m2"}, "quantization_config.fmt='e5m2', which is not supported; supported: 'e4m3'"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme='static'"),
        ({"weight_block_size": None}, "quantization_config.weight_block_size=None"),
        ({"weight_block_size": [True, True]}, r"quantization_config.weight_block_size=\[True, True\]"),
        ({"weight_block_size": [128]}, r"quantization_config.weight_block_size=\[128\]"),
        ({"expert_dtype": "fp4"}, "quantization_config.expert_dtype='fp4'"),
        ({"zero_point": True}, "quantization_config.zero_point=True"),
    ],
    ids=str,
)
def test_another_quantization_is_refused_by_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    quantize_folder(family_checkpoint(tmp_path / "in", "qwen2"), tmp_path / "fp8", **change)
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_hf(tmp_path / "fp8")
    assert "\n" not in str(error.value)


MATRIX = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({scale_of(MATRIX): None}, f"lacks '{scale_of(MATRIX)}', the scales of '{MATRIX}'"),
        ({scale_of(MATRIX): torch.ones(4, 3)}, r"as F32 \[4, 3\]; expected F32 \[4, 2\]"),
        ({scale_of(MATRIX): torch.ones(4, 2).bfloat16()}, r"as BF16 \[4, 2\]; expected F32 \[4, 2\]"),
        ({MATRIX: torch.ones(48, 32).to(torch.float8_e5m2)}, "as F8_E5M2; expected one of"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "'model.norm.weight' as F8_E4M3"),
        ({scale_of("model.norm.weight"): torch.ones(1)}, "'model.norm.weight_scale_inv', which no part"),
    ],
    ids=[
        "no scales",
        "scales of another shape",
        "scales of another type",
        "another float8",
        "a vector",
        "scales of a matrix that is not quantized",
    ],
)
def test_what_cannot_be_dequantized_is_refused_by_tensor(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = tmp_path / "fp8"
    quantize_folder(family_checkpoint(tmp_path / "in", "qwen2"), folder)
    stored = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_folder(folder, ModelConfig.from_hf(folder))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_damaged_scale_is_named_and_not_loaded(tmp_path: Path, scale: float) -> None:
    folder = tmp_path / "fp8"
    quantize_folder(family_checkpoint(tmp_path / "in", "qwen2"), folder)
    stored = load_file(folder / "model.safetensors")
    stored[scale_of(MATRIX)][1, 1] = scale
    save_file(stored, folder / "model.safetensors")
    model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), open_device("emulated"))
    with pytest.raises(ValueError, match=f"'{scale_of(MATRIX)}' with a scale that is negative or not finite"):
        load_weights(model, folder)


def test_float8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    quantize_folder(family_checkpoint(tmp_path / "in", "qwen2"), folder)
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="as F8_E4M3; expected .* states as quantization_config"):
        check_folder(folder, ModelConfig.from_hf(folder))
