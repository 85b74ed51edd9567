"""An engine with Ascend's operators, as the emulated card has them, generates what one with the plain ones does."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.model.spec import Latent, Sparse
from fusion.npu import open_device
from fusion.npu.operators import operators_of
from tests.costmodel.launch_counts import Launches
from tests.families import KINDS, family_checkpoint
from tests.inference.engines import by_id, generate, requests
from tests.rollouts import rollout_config

DEFAULT = ("qwen3_moe", "glm4_moe", "deepseek_v3")
"""Families that the default run tests; the others run with `-m extended`"""


@pytest.fixture(autouse=True)
def no_masks():
    """Ascend's table keeps a mask on the card, which other tests open with another capacity."""
    yield
    operators_of.cache_clear()


class Called(TorchDispatchMode):
    """Collects the names of the operators of `torch.ops.npu` that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "npu":
            self.names.add(operator._schema.name.removeprefix("npu::npu_"))
        return operator(*args, **(kwargs or {}))


def expected_calls(config: ModelConfig) -> set[str]:
    names = {"rms_norm", "add_rms_norm", "rotary_mul", "swiglu", "fusion_attention"}
    names |= {"scatter_pa_kv_cache", "fused_infer_attention_score"}
    if isinstance(config.attention, Latent):
        names.add("transpose_batchmatmul")
    for spec in config.layers:
        if isinstance(spec.mlp, Sparse):
            gate = "moe_gating_top_k_softmax_v2" if spec.mlp.router.plain else "moe_gating_top_k"
            names |= {gate, "moe_init_routing_v2", "grouped_matmul", "moe_token_unpermute"}
    return names


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize(
    "kind", [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS]
)
def test_greedy_tokens_and_logprobs(kind, tmp_path):
    """Of prompts that are packed, chunked and shared, and decoded in one batch."""
    folder, results = family_checkpoint(tmp_path, kind), []
    for operators in ("ascend", "plain"):
        device = open_device("emulated", capacity_bytes=2 << 30, operators=operators)
        if device.kind != "emulated":
            pytest.skip("no compiler to build the emulated NPU with")
        model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device)
        load_weights(model, folder)
        config = rollout_config(max_length=256, max_seqs=64, max_batch_tokens=96)
        engine = EmbeddedEngine(model, Mesh.single(), device, config, 5, False)
        engine.allocate_kv()
        with Called() as called:
            results.append(by_id(generate(engine, requests(9, 24, temperature=0.0))))
        engine.release_kv()
        wanted_calls = expected_calls(model.config) if operators == "ascend" else set()
        assert called.names == wanted_calls
    found, wanted = results
    for name, (tokens, logprobs) in wanted.items():
        assert found[name][0] == tokens
        assert found[name][1] == pytest.approx(logprobs, abs=1e-4)


class AfterTheFirstWait(Launches):
    """Lists what a card launches after the host has first waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waited, before = self.waits.total(), self.by_operation.copy()
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if waited and self.waits.total() == waited:
            self.late += self.by_operation - before
        return result


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
def test_the_host_waits_for_a_step_when_all_of_it_is_launched(tmp_path):
    """Also where the routing of its tokens is recorded."""
    device = open_device("emulated", capacity_bytes=2 << 30, operators="ascend")
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    folder = family_checkpoint(tmp_path, "qwen3_moe")
    model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device)
    load_weights(model, folder)
    made = EmbeddedEngine(model, Mesh.single(), device, rollout_config(max_length=256, max_seqs=8), 5, True)
    made.allocate_kv()
    made.submit(requests(6, max_tokens=20))
    for _ in range(4):
        made.step()
    with AfterTheFirstWait() as launches:
        made.step()
    made.suspend(), made.release_kv()
    assert launches.waits.total() and not launches.late
