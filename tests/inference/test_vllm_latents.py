"""What vLLM derives from weights of latent attention is what it would derive from the present ones.

A stand-in for vLLM's layer on a card, in plain torch; with `-m vllm` what vLLM's own layer derives is compared.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusion.inference.backends.vllm_checks import WeightsNotOurs, check_absorbed, check_live
from fusion.inference.backends.vllm_engine import VllmEngine
from fusion.inference.backends.vllm_latents import ABSORBED, AbsorbedLatents, absorbed
from fusion.model.local_param import LocalParam
from fusion.npu import open_device

HEADS, KEYS, VALUES, LATENT = 3, 4, 5, 6
ROWS = HEADS * (KEYS + VALUES)


class Layer(nn.Module):
    """As vLLM's `MLAAttention` once weights are loaded; ``copies``: as vllm-ascend's."""

    def __init__(self, weight: torch.Tensor, copies: bool):
        super().__init__()
        self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim = HEADS, LATENT, KEYS, VALUES
        self.kv_b_proj = nn.Linear(LATENT, ROWS, bias=False, device="meta")
        self.kv_b_proj.weight = nn.Parameter(weight, requires_grad=False)
        self.impl = SimpleNamespace(scale=0.5)
        by_head = weight.T.view(LATENT, HEADS, KEYS + VALUES)
        keys, values = by_head.split([KEYS, VALUES], dim=-1)
        self.W_UV = nn.Parameter(values.transpose(0, 1), requires_grad=False)
        self.W_UK_T = nn.Parameter(keys.permute(1, 2, 0), requires_grad=False)
        if copies:
            self.impl.W_UV, self.impl.W_UK_T = self.W_UV.data.contiguous(), self.W_UK_T.data.contiguous()

    def attend(self, query_HP: torch.Tensor, latents_TL: torch.Tensor) -> torch.Tensor:
        """Values [H, V] of one query, attending to latents."""
        of = self.impl if hasattr(self.impl, "W_UV") else self
        absorbed_query = torch.bmm(query_HP.unsqueeze(1), of.W_UK_T).squeeze(1)
        weights = (absorbed_query @ latents_TL.T).softmax(-1)
        return torch.bmm((weights @ latents_TL).unsqueeze(1), of.W_UV).squeeze(1)


def expanded(weight: torch.Tensor, query_HP: torch.Tensor, latents_TL: torch.Tensor) -> torch.Tensor:
    """The same from keys and values of every head, as where latents are not absorbed."""
    keys, values = (latents_TL @ weight.T).view(-1, HEADS, KEYS + VALUES).split([KEYS, VALUES], dim=-1)
    weights = torch.einsum("hp,thp->ht", query_HP, keys).softmax(-1)
    return torch.einsum("ht,thv->hv", weights, values)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("copies", [False, True])
def test_a_switch_and_a_new_version_are_attended_with(copies):
    device = open_device("emulated")
    layer = Layer(drawn(ROWS, LATENT, seed=1).to(device.torch_device), copies)
    check_absorbed(layer)
    latents, before = AbsorbedLatents(layer, device), device.memory_by_owner()["weights"]
    query, tokens = (drawn(*shape, seed=2).to(device.torch_device) for shape in ((HEADS, KEYS), (7, LATENT)))
    latents.write()
    held = device.memory_by_owner()["weights"] - before
    assert held >= copies * 4 * ROWS * LATENT and bool(held) == copies == bool(latents.addresses())
    for version in range(3):
        weight = drawn(ROWS, LATENT, seed=10 + version).to(device.torch_device)
        if version == 1:  # in place, as an adopted version
            layer.kv_b_proj.weight.data.copy_(weight)
            addresses = latents.addresses()
        else:  # in other memory, as a switch
            layer.kv_b_proj.weight.data = weight
            latents.release()
            assert device.memory_by_owner()["weights"] == before
        latents.follow()
        latents.write()
        assert version != 1 or latents.addresses() == addresses
        torch.testing.assert_close(layer.attend(query, tokens), expanded(weight, query, tokens))
        assert layer.W_UV.data_ptr() >= layer.kv_b_proj.weight.data_ptr()


def test_what_is_derived_otherwise_is_refused_by_name():
    stale, other = (Layer(drawn(ROWS, LATENT, seed=1), copies=True) for _ in range(2))
    stale.impl.W_UV = stale.impl.W_UV + 1
    other.impl.wd_qkv = torch.ones(3)
    for layer, name in ((stale, "W_UV"), (other, "wd_qkv")):
        with pytest.raises(WeightsNotOurs, match=f"layer.{name}: vLLM derives"):
            check_absorbed(nn.ModuleDict({"layer": layer}))


def test_modules_that_a_dummy_batch_does_not_reach_are_probed_alone():
    layer = Layer(drawn(ROWS, LATENT, seed=1), copies=False)
    module, table = nn.ModuleDict({"layer": layer}), [LocalParam("layer.kv_b_proj.weight", (ROWS, LATENT), ())]
    core = SimpleNamespace(
        module=module, allocate_kv=lambda blocks: None, dummy_pass=lambda tokens: None, release_kv=lambda: None
    )
    check_live(core, table)
    packed = layer.kv_b_proj.weight.data.clone()
    layer.kv_b_proj.forward = lambda rows: rows @ packed.T
    with pytest.raises(WeightsNotOurs, match=r"layer.kv_b_proj.weight: vLLM computes from a copy"):
        check_live(core, table)
    del layer.W_UK_T
    with pytest.raises(WeightsNotOurs, match=r"layer.kv_b_proj.weight: vLLM computes without the module"):
        check_live(core, table)


def test_an_engine_derives_before_it_counts_free_memory_and_with_every_version(monkeypatch):
    calls = []
    engine = object.__new__(VllmEngine)
    engine.model = SimpleNamespace(
        derive=lambda: calls.append("derive"), release_derived=lambda: calls.append("release")
    )
    engine.config, engine._version, engine._holds_kv = SimpleNamespace(engine=SimpleNamespace(graphs=True)), 0, False
    engine.drafter = None
    engine.core = SimpleNamespace(release_kv=lambda: calls.append("release_kv"))
    monkeypatch.setattr(engine, "_restart", lambda: None)
    monkeypatch.setattr(VllmEngine.__mro__[1], "allocate_kv", lambda self: calls.append("allocate_kv"))
    engine.policy_version = 1
    assert calls == [], "weights may be on their way"
    engine.allocate_kv()
    engine._holds_kv = True
    engine.policy_version = 2
    engine.release_kv()
    assert calls == ["derive", "allocate_kv", "derive", "release_kv", "release"]


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="bash scripts/environment.sh --backend vllm")
def test_vllms_own_layer_derives_these_views_and_computes_from_them():
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layer = Layer(drawn(ROWS, LATENT, seed=1), copies=False)
    layer.kv_b_proj.quant_method = UnquantizedLinearMethod()
    del layer.W_UV, layer.W_UK_T
    layer.quant_config, layer.dcp_q_replicate = None, False
    for name in "qkv":
        for kind in ("_scale", "_scale_float", "_scale_cpu"):
            setattr(layer, f"_{name}{kind}", torch.ones(()))
    layer._prob_scale = layer._o_scale_float = torch.ones(())
    layer.is_aiter_triton_fp4_bmm_enabled = layer.is_aiter_triton_fp8_bmm_enabled = False
    for _ in range(2):
        MLAAttention.process_weights_after_loading(layer, torch.float32)
        for name in ABSORBED:
            assert torch.equal(getattr(layer, name), absorbed(layer)[name])
            assert getattr(layer, name).data_ptr() == absorbed(layer)[name].data_ptr(), "a view, no copy"
    check_absorbed(layer)
    latents, weight = AbsorbedLatents(layer, open_device("emulated")), drawn(ROWS, LATENT, seed=2)
    layer.kv_b_proj.weight.data = weight
    latents.follow()
    attended, values = drawn(4, HEADS * LATENT, seed=3), torch.empty(4, HEADS * VALUES)
    MLAAttention._v_up_proj(layer, attended, values)
    of_values = weight.view(HEADS, KEYS + VALUES, LATENT)[:, KEYS:]
    expected = torch.einsum("bhl,hvl->bhv", attended.view(4, HEADS, LATENT), of_values)
    torch.testing.assert_close(values, expected.reshape(4, -1))
