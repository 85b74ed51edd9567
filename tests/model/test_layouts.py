"""One checkpoint in every layout: the logits are transformers', and what is written out transformers loads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusion.model import Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, save_folder
from tests.helpers import TINY, TINY_EXPERTS, run_ranks, tiny_checkpoint, tiny_hf
from tests.pairwise import axes, is_wide, thinned

KINDS = {
    "moe": {},
    "moe-untied": {"tie_word_embeddings": False, "norm_topk_prob": False},
    "dense": {"experts": False},
}
LAYOUTS = [
    Parallel(),
    Parallel(2, tp=2),
    Parallel(2, ep=2),
    Parallel(2, tp=2, etp=2),
    Parallel(2, pp=2),
    Parallel(4, tp=2, ep=2),
    Parallel(4, ep=4),
    Parallel(4, tp=4, ep=4),
    Parallel(4, tp=4, ep=2),
    Parallel(4),
    Parallel(4, tp=2, ep=2, pp=2),
    Parallel(4, tp=2, ep=2, etp=2),
    Parallel(4, etp=4),
]
LENGTHS = [1, 2, 7, 7, 11]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: tiny_checkpoint(folder / kind, **changes) for kind, changes in KINDS.items()}


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(32, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])


def logits_and_export(rank, device, parallel, checkpoint, folder):
    """The last stage's logits of the batch, gathered over TP (None on other stages); and an export of the weights."""
    mesh = Mesh.create(parallel)
    config = ModelConfig.from_hf(checkpoint)
    model = Transformer(config, mesh, device, bucket_bytes=5000)
    load_weights(model, checkpoint)
    ids, positions = (tensor.to(device.torch_device) for tensor in packed())
    hidden = None
    with torch.no_grad():
        if not mesh.first_stage:
            hidden = torch.empty(model.hidden_rows(len(ids)), config.hidden_size, device=device.torch_device)
            dist.recv(hidden, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
        out = model(ids, positions, PackedAttention(LENGTHS, model.operators), hidden=hidden)
        if not mesh.last_stage:
            dist.send(out, group=mesh.pp_group, group_dst=mesh.pp_rank + 1)
        logits = model.head.logits(out).cpu() if mesh.last_stage else None
    if logits is not None and mesh.tp_group is not None:
        columns = [torch.empty_like(logits) for _ in range(parallel.tp)]
        dist.all_gather(columns, logits, group=mesh.tp_group)
        logits = torch.cat(columns, dim=1)
    save_folder(model, folder, shard_bytes=60000)
    return logits


CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind != "dense" or layout.ep == layout.etp == 1]


@pytest.mark.parametrize(
    ("kind", "layout"),
    thinned(CASES, lambda case: (case[0], *axes(case[1])), extended=lambda case: is_wide(case[1])),
    ids=str,
)
def test_logits_and_export_in_every_layout(checkpoints, tmp_path, kind, layout):
    from transformers import AutoModelForCausalLM

    results = run_ranks(logits_and_export, layout.world, layout, checkpoints[kind], str(tmp_path))
    model = tiny_hf(**KINDS[kind])
    with torch.no_grad():
        pieces = [model(ids[None]).logits[0] for ids in packed()[0].split(LENGTHS)]
    for logits in [logits for logits in results if logits is not None]:
        torch.testing.assert_close(logits, torch.cat(pieces), atol=1e-4, rtol=1e-4)

    assert len(list(Path(tmp_path).glob("model-*.safetensors"))) > 1
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_what_two_models_hold_alike_is_stored_once(device):
    """EP 4 and EP 2 at rank 0: half of the experts, the norms and the routers are the same storage."""
    config, dtype = ModelConfig.from_hf({"model_type": "qwen3_moe"} | TINY | TINY_EXPERTS), torch.float32
    one = Transformer(config, Mesh(Parallel(4, tp=2, ep=2), 0), device, dtype)
    before = device.memory().allocated
    two = Transformer(config, Mesh(Parallel(4, ep=4), 0), device, dtype, share=one.weights, resident=False)
    assert device.memory().allocated - before < 4096  # the rotary frequencies
    shared = {param.name for i in two.weights.shared for param, _ in two.weights.plans[i].entries}
    assert {f"layers.1.moe.experts.{expert}.down" for expert in (0, 1)} < shared
    assert "layers.0.moe.router" in shared and "layers.0.attention.qkv" not in shared and "embed" not in shared
    one.weights.views["layers.1.moe.experts.1.down"].fill_(3.0)
    assert bool((two.weights.views["layers.1.moe.experts.1.down"] == 3.0).all())
    two.weights.allocate()
    two.weights.release()
    assert one.weights.resident and not two.weights.resident
