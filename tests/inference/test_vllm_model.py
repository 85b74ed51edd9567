"""vLLM's weights in our buckets: switched bitwise and within the bound, computed from, and checked when it starts."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion.ep_switch import Layout, Switcher, plan_switch
from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, global_params
from fusion.model.formats import EMBEDDED, MEGATRON, VLLM_CPU, vllm
from fusion.npu import open_device
from tests.families import YARN, family_checkpoint
from tests.helpers import run_ranks, tiny_config
from tests.inference import vllm_engines as scenarios
from tests.inference.engines import by_id, requests
from tests.machine import run
from tests.rollouts import rollout_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="bash scripts/environment.sh --backend vllm"),
]

BUCKET = 1 << 14
ROLLOUT = rollout_config(max_length=160, max_seqs=4, max_batch_tokens=64, max_kv_tokens=640)
UNTIED = tiny_config(tie_word_embeddings=False, num_key_value_heads=4, vocab_size=80)
TIED = tiny_config(num_hidden_layers=4)
DENSE = tiny_config(experts=False, num_hidden_layers=4, num_key_value_heads=1)


def global_values(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random global tensors, the same on every rank."""
    values = {}
    for name, shape in global_params(config).items():
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        values[name] = drawn * 0.2 + 1 if len(shape) == 1 else drawn * 0.2
    return values


def fill(model: Any, values: dict[str, torch.Tensor]) -> None:
    for param in model.table:
        for part in param.parts:
            box = values[part.name][tuple(slice(*span) for span in part.region)]
            part.view(model.weights.views[param.name]).copy_(box)


def check_filled(model: Any, values: dict[str, torch.Tensor]) -> int:
    """Every part bitwise, and the padding zero; returns its elements."""
    padding = 0
    for param in model.table:
        local = model.weights.views[param.name].cpu()
        for part in param.parts:
            box = values[part.name][tuple(slice(*span) for span in part.region)].to(local.dtype)
            assert torch.equal(part.view(local), box), param.name
        for hole in param.holes:
            values_of_hole = local[tuple(slice(*span) for span in hole)]
            assert not values_of_hole.any(), param.name
            padding += values_of_hole.numel()
    return padding


def generated(engine: Any, leads: bool) -> list:
    if leads:
        engine.submit(requests(3, max_tokens=6))
    return scenarios.run(engine)


def switched(rank: int, device: Any, config: ModelConfig, train: Layout, infer: Layout) -> dict[str, Any]:
    """Two switches to vLLM and back. Returns the padding, the shared units, and what was generated, by backend."""
    from fusion.inference.backends.vllm_engine import VllmEngine
    from fusion.inference.backends.vllm_model import VllmModel
    from fusion.training.backends.megatron_model import MegatronModel

    meshes, values = [Mesh.create(layout.parallel, layout.ranks) for layout in (train, infer)], global_values(config)
    trained: Any = {EMBEDDED: Transformer, MEGATRON: MegatronModel}[train.format]
    ours = trained(config, meshes[0], device, bucket_bytes=train.bucket_bytes)
    fill(ours, values)
    reference = Transformer(config, meshes[1], device)
    fill(reference, values)
    made = EmbeddedEngine(reference, meshes[1], device, ROLLOUT, seed=5)
    made.allocate_kv()
    expected = generated(made, rank == 0)
    made.release_kv()
    engines = dict(rollout=ROLLOUT, share=ours.weights, resident=False, bucket_bytes=infer.bucket_bytes)
    models = [ours, VllmModel(config, meshes[1], device, **engines)]
    engine = VllmEngine(models[1], meshes[1], device, ROLLOUT, seed=5)
    found, padding, shared = [], 0, 0
    for step in range(2):
        for source, target in ((0, 1), (1, 0)):
            layouts = train, infer
            plan = plan_switch(layouts[source], layouts[target], BUCKET)
            switcher = Switcher(plan, models[source], models[target], device=device)
            gc.collect()
            storages = [flat.untyped_storage() for flat in models[source].weights.flats]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
            others = device.memory().allocated - sum(held.values())
            device.reset_peak()
            switcher.run()
            peak = device.memory().peak_allocated - others
            rounding = 512 * (len(plan.source.units(rank)) + len(plan.target.units(rank)) + 4)
            assert peak <= plan.peak_bytes(rank) + rounding and plan.peak_bytes(rank) <= plan.bound_bytes(rank)
            padding += check_filled(models[target], values)
            if target == 1:
                shared = len(plan.shared_units(rank))
                engine.policy_version = step + 1
                engine.allocate_kv()
                found.append(generated(engine, rank == 0))
                engine.release_kv()
                if step == 0:
                    for flat in models[1].weights.flats:
                        assert flat.untyped_storage().nbytes() > 0
    return dict(expected=expected, found=found, padding=padding, shared=shared)


WORLD4 = (0, 1, 2, 3)
SWITCHES = {
    "TP2EP2 to TP2EP4, padded rows": (UNTIED, EMBEDDED, Parallel(4, tp=2, ep=2), Parallel(4, tp=2, ep=4)),
    "PP2EP2 to EP4, tied": (TIED, EMBEDDED, Parallel(4, pp=2, ep=2), Parallel(4, ep=4)),
    "EP4 to EP4": (UNTIED, EMBEDDED, Parallel(4, ep=4), Parallel(4, ep=4)),
    "dense TP2PP2 to TP4, replicated keys": (DENSE, EMBEDDED, Parallel(4, tp=2, pp=2), Parallel(4, tp=4)),
    "megatron TP2EP2 to TP4, cut experts": (UNTIED, MEGATRON, Parallel(4, tp=2, ep=2), Parallel(4, tp=4, etp=4)),
    "megatron TP2EP2ETP2 to TP2EP4, tied": (TIED, MEGATRON, Parallel(4, tp=2, ep=2, etp=2), Parallel(4, tp=2, ep=4)),
    "megatron EP4 to EP4": (UNTIED, MEGATRON, Parallel(4, ep=4), Parallel(4, ep=4)),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_bitwise_within_the_bound_and_computed_from(name):
    config, trained_by, train, infer = SWITCHES[name]
    if trained_by == MEGATRON:
        pytest.importorskip("megatron.core")
    layouts = (
        Layout(config, train, WORLD4, bucket_bytes=BUCKET, format=trained_by),
        Layout(config, infer, WORLD4, bucket_bytes=BUCKET, format=VLLM_CPU),
    )
    results = run_ranks(switched, 4, config, *layouts, timeout_s=300)
    expected = by_id([output for result in results for output in result["expected"]])
    assert len(expected) == 3
    for step in range(2):
        found = by_id([output for result in results for output in result["found"][step]])
        assert {name: tokens for name, (tokens, _) in found.items()} == {n: t for n, (t, _) in expected.items()}
        for request, (_, logprobs) in found.items():
            assert logprobs == pytest.approx(expected[request][1], abs=1e-5)
    assert any(result["padding"] for result in results) == (config.vocab_size % 64 > 0)
    if train == infer:
        assert all(result["shared"] >= config.num_layers for result in results), "norms and routers stay in place"


OF_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2:latent queries, YaRN": dict(q_lora_rank=24, rope_parameters=YARN),
    "deepseek_v2:greedy, other norms": dict(topk_method="greedy", q_lora_rank=24, rms_norm_eps=1e-2),
    "qwen2_moe:normalised": dict(norm_topk_prob=True, mlp_only_layers=[0]),
}
"""Family: what differs from its tiny model → these fields"""


def logprobs(engine: Any, model: Any, leads: bool) -> list:
    if leads:
        engine.submit(requests(3, max_tokens=5))
    return scenarios.run(engine)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(2, tp=2, etp=2)], ids=str)
@pytest.mark.parametrize("case", [*vllm.FAMILIES, *OF_FAMILIES])
def test_every_described_family_is_held_and_computed_as_the_embedded_engine_does(tmp_path, case, parallel):
    kind = case.partition(":")[0]
    changes = dict(rms_norm_eps=vllm.OLMOE_EPS, norm_topk_prob=False) if kind == "olmoe" else {}
    folder = family_checkpoint(tmp_path, kind, **changes | OF_FAMILIES.get(case, {}))
    if not ModelConfig.from_hf(folder).num_experts:
        parallel = replace(parallel, etp=1)
    results = run_ranks(scenarios.of_both, parallel.world, folder, parallel, logprobs, {}, timeout_s=240)
    ours, theirs = (by_id([o for of_rank in results for o in of_rank[name]]) for name in ("embedded", "vllm"))
    assert len(ours) == 3 and {n: t for n, (t, _) in ours.items()} == {n: t for n, (t, _) in theirs.items()}
    for name, (_, expected) in ours.items():
        assert theirs[name][1] == pytest.approx(expected, abs=2e-5)


def refusals(rank: int, device: Any) -> dict[str, tuple[str, str]]:
    """What the checks say of tables that are wrong, by case: the tensor and the message."""
    from fusion.inference.backends import vllm_core
    from fusion.inference.backends.vllm_checks import (
        KeyedWeights,
        WeightsNotOurs,
        check_experts,
        check_live,
        check_tensors,
    )

    config = tiny_config(mlp_only_layers=[1])
    keyed = KeyedWeights(config, torch.float32)
    core = vllm_core.start(config, Mesh.single(), device, ROLLOUT, load=keyed.load)
    table = vllm.local_params(config, Parallel(), 0, vllm.CPU)
    by_name = {param.name: param for param in table}
    stack = by_name["model.layers.0.mlp.experts.routed_experts.w13_weight"]
    dense = by_name["model.layers.1.mlp.gate_up_proj.weight"]
    qkv = by_name["model.layers.0.self_attn.qkv_proj.weight"]
    refused = {}

    def check(name: str, work: Any) -> None:
        with pytest.raises(WeightsNotOurs) as caught:
            work()
        refused[name] = caught.value.tensor, str(caught.value)

    def with_parts(param: Any, order: list[int]) -> list:
        """The table with the places of some parts exchanged."""
        places = [part.local for part in param.parts]
        parts = tuple(replace(part, local=places[at]) for part, at in zip(param.parts, order, strict=True))
        return [replace(param, parts=parts) if one is param else one for one in table]

    def with_shape(param: Any, shape: tuple[int, ...]) -> list:
        return [replace(param, shape=shape) if one is param else one for one in table]

    swapped = [2, 3, 0, 1, *range(4, len(stack.parts))]
    check("experts swapped", lambda: keyed.check(with_parts(stack, swapped), core.module))
    check("places of experts", lambda: check_experts(with_parts(stack, swapped), core.module))
    check("gate and up swapped", lambda: keyed.check(with_parts(dense, [1, 0]), core.module))
    check("k and v swapped", lambda: keyed.check(with_parts(qkv, [0, 2, 1]), core.module))
    shape = dense.shape[0], dense.shape[1] + 1
    check("shape", lambda: check_tensors(with_shape(dense, shape), core.module, torch.float32, 0))
    check("dtype", lambda: check_tensors(table, core.module, torch.bfloat16, 0))
    check("missing", lambda: check_tensors(table[:-1], core.module, torch.float32, 0))
    down: Any = core.module.get_submodule("model.layers.1.mlp.down_proj")
    copy, apply = down.weight.detach().clone(), down.quant_method.apply
    down.quant_method.apply = lambda layer, x, bias=None: torch.nn.functional.linear(x, copy, bias)
    check("stale copy", lambda: check_live(core, table))
    down.quant_method.apply = apply
    experts: Any = core.module.get_submodule("model.layers.0.mlp.experts.routed_experts")
    kernel, forward = experts.quant_method.cpu_fused_moe, experts.quant_method.cpu_fused_moe.forward_method
    remembered = SimpleNamespace(
        w13_weight=experts.w13_weight, w2_weight=experts.w2_weight.detach().clone(), expert_map=experts.expert_map
    )
    kernel.forward_method = lambda layer, *args: forward(remembered, *args)
    check("stale experts", lambda: check_live(core, table))
    kernel.forward_method = forward
    keyed.check(table, core.module)
    check_experts(table, core.module)
    check_tensors(table, core.module, torch.float32, 0)
    check_live(core, table)
    return refused


def test_wrong_tables_and_stale_copies_are_refused_by_the_name_of_the_tensor():
    (refused,) = run_ranks(refusals, 1, timeout_s=180)
    stack, dense = "model.layers.0.mlp.experts.routed_experts.w13_weight", "model.layers.1.mlp.gate_up_proj.weight"
    for case in ("experts swapped", "places of experts"):
        assert refused[case][0] == stack
    assert "experts.0.gate_proj" in refused["experts swapped"][1]
    assert "{0: 1, 1: 0, 2: 2" in refused["places of experts"][1]
    assert refused["gate and up swapped"][0] == refused["shape"][0] == dense
    assert refused["k and v swapped"][0] == "model.layers.0.self_attn.qkv_proj.weight"
    assert "((96, 33), torch.float32), vLLM ((96, 32), torch.float32)" in refused["shape"][1]
    assert "torch.float32" in refused["dtype"][1] and "torch.bfloat16" in refused["dtype"][1]
    assert "no such tensor" in refused["missing"][1]
    assert refused["stale copy"][0] == "model.layers.1.mlp.down_proj.weight"
    assert refused["stale experts"][0] == "model.layers.0.mlp.experts.routed_experts.w2_weight"


def packed(experts: bool) -> str:
    """What is said of vLLM as it is, without `compute_from_plain_tensors`, or only of how it holds experts."""
    from fusion.inference.backends import vllm_host
    from fusion.inference.backends.vllm_checks import WeightsNotOurs
    from fusion.inference.backends.vllm_model import VllmModel

    def plain_linear_maps() -> None:
        import vllm._custom_ops as ops

        ops._supports_onednn = not experts

    vllm_host.compute_from_plain_tensors = plain_linear_maps
    with pytest.raises(WeightsNotOurs) as caught:
        VllmModel(tiny_config(experts), Mesh.single(), open_device("emulated"), rollout=ROLLOUT)
    return str(caught.value)


@pytest.mark.parametrize("experts", [False, True])
def test_vllms_own_packing_is_refused_at_the_start(experts):
    """In a process of its own, in which nothing has turned the packing off."""
    script = f"from tests.inference.test_vllm_model import packed; print(packed({experts}))"
    *_, message = run([sys.executable, "-c", script], 120).stdout.splitlines()
    tensor = "mlp.experts.routed_experts.w13_weight" if experts else "self_attn.qkv_proj.weight"
    assert message.startswith(f"rollout.backend=vllm: model.layers.0.{tensor}") and "backend=embedded" in message


def unrecorded() -> str:
    """What is said where vLLM binds its recorder of experts to no layer."""
    from fusion.inference.backends import vllm_host
    from fusion.inference.backends.vllm_model import VllmModel

    def bind_none() -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        GPUModelRunner._bind_routed_experts_capturer = lambda self, capturer: None

    vllm_host.record_in_experts = bind_none
    with pytest.raises(ValueError) as caught:
        VllmModel(tiny_config(True), Mesh.single(), open_device("emulated"), rollout=ROLLOUT, routing=True)
    return str(caught.value)


def test_experts_that_are_not_recorded_are_found_at_the_start():
    script = "from tests.inference.test_vllm_model import unrecorded; print(unrecorded())"
    *_, message = run([sys.executable, "-c", script], 120).stdout.splitlines()
    assert message.startswith("algorithm.replay=rollout: vLLM does not record the experts of the layers [0")
