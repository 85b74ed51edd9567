"""One checkpoint in every layout: the logits are transformers', and what is written out transformers loads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusion.model import Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, save_folder
from tests.helpers import run_ranks, tiny_checkpoint, tiny_hf

KINDS = {
    "moe": {},
    "moe-untied": {"tie_word_embeddings": False, "norm_topk_prob": False},
    "dense": {"experts": False},
}
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 1, 4), (4, 4, 4), (4, 4, 2), (4, 1, 1)]
LENGTHS = [1, 2, 7, 7, 11]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: tiny_checkpoint(folder / kind, **changes) for kind, changes in KINDS.items()}


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(32, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])


def logits_and_export(rank, device, world, tp, ep, checkpoint, folder):
    """This rank's logits of the batch, its vocabulary columns gathered over TP; and an export of the weights."""
    mesh = Mesh.create(Parallel(world, tp, ep))
    model = Transformer(ModelConfig.from_hf(checkpoint), mesh, device, bucket_bytes=20000)
    load_weights(model, checkpoint)
    ids, positions = (tensor.to(device.torch_device) for tensor in packed())
    with torch.no_grad():
        logits = model.logits(model(ids, positions, PackedAttention(LENGTHS))).cpu()
    columns = [torch.empty_like(logits) for _ in range(tp)]
    if mesh.tp_group is None:
        columns = [logits]
    else:
        dist.all_gather(columns, logits, group=mesh.tp_group)
    save_folder(model, folder, shard_bytes=60000)
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind != "dense" or layout[2] == 1],
    ids=lambda value: value if isinstance(value, str) else "world{}-tp{}-ep{}".format(*value),
)
def test_logits_and_export_in_every_layout(checkpoints, tmp_path, kind, layout):
    from transformers import AutoModelForCausalLM

    world, tp, ep = layout
    results = run_ranks(logits_and_export, world, world, tp, ep, checkpoints[kind], str(tmp_path))
    model = tiny_hf(**KINDS[kind])
    with torch.no_grad():
        pieces = [model(ids[None]).logits[0] for ids in packed()[0].split(LENGTHS)]
    for logits in results:
        torch.testing.assert_close(logits, torch.cat(pieces), atol=1e-4, rtol=1e-4)

    assert len(list(Path(tmp_path).glob("model-*.safetensors"))) > 1
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
