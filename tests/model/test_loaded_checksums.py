"""Checksums of what ranks load from a folder: equal in every layout, and another one for every flipped bit."""

import random

import torch
from safetensors import safe_open

from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.model.box_checksum import MODULUS
from fusion.npu import open_device
from tests.helpers import run_ranks, tiny_checkpoint

LAYOUTS = [Parallel(world=2, tp=2), Parallel(world=2, ep=2), Parallel(world=2, pp=2), Parallel(world=2)]


def _load(device, mesh, folder, dtype=torch.float32):
    model = Transformer(ModelConfig.from_hf(folder), mesh, device, dtype, bucket_bytes=20_000)
    return load_weights(model, folder, whole_bytes=0)


def _in_layouts(rank, device, folder):
    return [_load(device, Mesh.create(layout), folder) for layout in LAYOUTS]


def _added(sums):
    names = {name for of_rank in sums for name in of_rank}
    return {name: sum(of_rank.get(name, 0) for of_rank in sums) % MODULUS for name in names}


def test_the_checksum_of_a_file_is_equal_in_every_layout_and_dtype_and_changes_with_every_bit(tmp_path):
    folder, device = tiny_checkpoint(tmp_path, tie_word_embeddings=True), open_device("emulated")
    alone = _load(device, Mesh.single(), folder)
    assert list(alone) == ["model.safetensors"] and alone == _load(device, Mesh.single(), folder, torch.bfloat16)
    for of_layout in zip(*run_ranks(_in_layouts, 2, folder), strict=True):
        assert _added(of_layout) == alone
    model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device, torch.float32)
    assert load_weights(model, folder) == {}, "files up to 1 GiB are digested whole"
    file, chance = tmp_path / "model.safetensors", random.Random(0)
    with safe_open(file, framework="pt") as opened:
        assert len(list(opened.keys())) > 10
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(8):
        flipped, bit = bytearray(data), chance.randrange(8 * header, 8 * len(data))
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert _load(device, Mesh.single(), folder) != alone
