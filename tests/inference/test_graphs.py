"""Steps that only decode are replayed as graphs, on the emulated card with Ascend's operators: tokens are those of an
engine without graphs, whatever comes, goes and moves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference import EmbeddedEngine, graphs
from fusion.inference.batch import BatchSize
from fusion.inference.config import check_graphs
from fusion.inference.graphs import padded
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.npu import open_device
from fusion.npu.failures import CollectiveFailed, FailureKind, kind_of
from fusion.npu.operators import operators_of
from tests.families import KINDS, family_checkpoint
from tests.helpers import run_ranks
from tests.inference.engines import by_id, checkpoint, generate, generate_brokenly, requests
from tests.inference.test_whole_rows import with_operators
from tests.rollouts import rollout_config

pytestmark = pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")


@pytest.fixture(autouse=True)
def no_masks():
    """Ascend's table keeps a mask on the card, which other tests open with another capacity."""
    yield
    operators_of.cache_clear()


def engine(folder: str, graphs: bool = True, routing: bool = False, **rollout: Any) -> EmbeddedEngine:
    device = open_device("emulated", capacity_bytes=2 << 30, operators="ascend")
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device, torch.float64)
    load_weights(model, folder)
    config = rollout_config(**(dict(max_length=256, max_seqs=8, max_batch_tokens=96, graphs=graphs) | rollout))
    made = EmbeddedEngine(model, Mesh.single(), device, config, 5, routing)
    made.allocate_kv()
    return made


def counted(model: Transformer) -> list[int]:
    """Returns a list that grows by one with each pass of the model."""
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    return passes


def check_equal(found: list[Any], wanted: list[Any]) -> None:
    """Other sizes of a batch differ by the rounding of references, which compute in float32."""
    assert by_id(found).keys() == by_id(wanted).keys()
    expected = {one.request_id: one for one in wanted}
    for one in found:
        other = expected[one.request_id]
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.routing is other.routing is None or torch.equal(one.routing, other.routing)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("qwen3_moe", "deepseek_v3") else pytest.param(kind, marks=pytest.mark.extended)
        for kind in KINDS
    ],
)
def test_tokens_and_routing_are_those_of_computed_steps(kind, tmp_path):
    folder, results = family_checkpoint(tmp_path, kind), []
    for with_graphs in (True, False):
        made = engine(folder, with_graphs, routing=kind in ("qwen3_moe", "deepseek_v3"), max_seqs=6)
        run = counted(made.model)
        results.append(generate(made, requests(12, 60)))
        made.release_kv()
        steps, captured = made.counters.graph_steps, made.counters.graphs_captured
        assert (steps > 20 and captured > 2) if with_graphs else (steps == captured == 0)
        if with_graphs:
            runs = len(run) + steps - 2 * captured  # a capture runs the model twice, and is replayed
        else:
            assert runs == len(run), "replayed steps do not run the model"
    check_equal(*results)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_go_and_lose_their_kv(seed):
    """With new versions of equal weights in between, at which graphs stay."""
    wanted = requests(9, 40, seed)
    made, plain = engine(checkpoint()), engine(checkpoint(), graphs=False)
    found = generate_brokenly(made, wanted, seed)
    assert made.counters.graph_steps > 5
    for name, (tokens, logprobs) in by_id(generate(plain, wanted)).items():
        assert found[name][0] == tokens
        assert found[name][1] == pytest.approx(logprobs, abs=1e-6)


def test_graphs_stay_while_what_they_read_does():
    """New weights in the same place are read; KV that was released, and weights that moved, drop the graphs."""
    made, wanted = engine(checkpoint()), requests(4, 40)
    weights, counters = made.model.weights, made.counters

    def results() -> tuple[Any, Any]:
        plain = engine(checkpoint(), graphs=False)
        for ours, theirs in zip(weights.flats, plain.model.weights.flats, strict=True):
            theirs.copy_(ours)
        return generate(made, wanted), generate(plain, wanted)

    check_equal(*results())
    captured = counters.graphs_captured
    for flat in weights.flats:
        flat.mul_(1.5)
    made.policy_version += 1
    check_equal(*results())
    assert counters.graphs_dropped == 0 and counters.graphs_captured >= captured

    steps, captured = counters.graph_steps, counters.graphs_captured
    held = [flat.clone() for flat in weights.flats]
    weights.release()
    taken = [torch.empty_like(values) for values in held]  # where the weights were
    weights.allocate()
    assert len(taken) == len(held)
    for flat, values in zip(weights.flats, held, strict=True):
        flat.copy_(values)
    made.policy_version += 1
    check_equal(*results())
    assert counters.graphs_dropped == captured and counters.graphs_captured > captured
    assert counters.graph_steps > steps

    made.release_kv()
    assert counters.graphs_dropped == counters.graphs_captured and not made.graphs._graphs
    made.allocate_kv()
    check_equal(*results())


def test_a_model_that_reads_the_card_ends_by_name(monkeypatch):
    made = engine(checkpoint())
    monkeypatch.setattr(made.model.layers["1"], "forward", lambda x, **kwargs: (x * x.sum().item(), None))
    with pytest.raises(RuntimeError, match=r"rollout\.engine\.graphs=true: .*item.*; expected false"):
        generate(made, requests(3, 20))


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), CollectiveFailed("lost"), ConnectionError("lost")])
def test_a_failure_while_a_step_is_captured_keeps_its_kind(monkeypatch, error, at_the_end):
    made = engine(checkpoint())

    def capture(compute, sharing=None):
        try:
            raise error
        except Exception:
            if at_the_end:  # as a card does, whose capture is void
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            raise

    monkeypatch.setattr(made.graphs._device, "capture", capture)
    with pytest.raises(type(error), match=str(error)):
        generate(made, requests(3, 20))


def lose_peer(rank: int, device: Any, captures: bool) -> str:
    """Rank 1 ends while rank 0 captures, or replays, a step with a collective. Returns how that fails."""
    x, peers = torch.ones(4, device=device.torch_device), dist.new_group()

    def compute() -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=peers)
        return y

    with torch.inference_mode():
        compute()
        if not captures:
            graph, _ = device.capture(compute)
        if rank == 1:
            dist.destroy_process_group(peers)
            return ""
        try:
            device.capture(compute) if captures else graph.replay()
        except Exception as error:
            return kind_of(error).value
    return "nothing"


@pytest.mark.parametrize("captures", [True, False])
def test_a_peer_that_is_lost_is_named_as_such(captures):
    assert run_ranks(lose_peer, 2, captures) == [FailureKind.PEER_LOST.value, ""]


def test_no_more_sizes_are_captured_than_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    made = engine(checkpoint())
    check_equal(generate(made, requests(9, 30)), generate(engine(checkpoint(), graphs=False), requests(9, 30)))
    assert made.counters.graphs_captured == 1 < made.counters.graph_steps


@given(st.integers(1, 300), st.integers(1, 5000))
def test_sizes_are_padded_to_few(rows, blocks):
    size = padded(BatchSize(rows, blocks))
    assert rows <= size.rows < max(2 * rows, rows + 16) and blocks <= size.blocks < 2 * blocks
    assert padded(size) == size


def test_the_host_table_captures_no_graphs():
    device = open_device("emulated", capacity_bytes=2 << 30)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    model = Transformer(ModelConfig.from_hf(checkpoint()), Mesh.single(), device)
    with pytest.raises(ValueError, match=r"rollout\.engine\.graphs=true: the operators 'cpu' .* device\.operators=asc"):
        EmbeddedEngine(model, Mesh.single(), device, rollout_config(graphs=True))


@pytest.mark.parametrize(
    ("backend", "kind", "operators", "invariant", "refused"),
    [
        ("embedded", "emulated", "ascend", False, ""),
        ("embedded", "npu", "auto", False, ""),
        ("embedded", "cuda", "cuda_fused", False, ""),
        ("embedded", "auto", "auto", False, ""),
        ("embedded", "emulated", "auto", False, "the operators 'cpu' of this card wait for the host"),
        ("embedded", "npu", "plain", False, "device.operators=ascend or cuda"),
        ("embedded", "npu", "auto", True, "rollout.engine.batch_invariant=true"),
        ("embedded", "auto", "auto", True, "rollout.engine.batch_invariant=true"),
        ("vllm", "cuda", "auto", False, ""),
        ("vllm", "auto", "auto", False, ""),
        ("vllm", "emulated", "ascend", False, "rollout.backend=vllm"),
        ("vllm", "npu", "auto", False, "rollout.backend=vllm"),
    ],
)
def test_graphs_are_refused_where_there_are_none(backend, kind, operators, invariant, refused):
    config = rollout_config(backend=backend, batch_invariant=invariant, graphs=True)
    if refused:
        with pytest.raises(ValueError, match=r"rollout\.engine\.graphs=true: .*" + re.escape(refused)):
            check_graphs(config, kind, operators)
    else:
        check_graphs(config, kind, operators)
    check_graphs(rollout_config(backend=backend, batch_invariant=invariant), kind, operators)


def generate_rank(rank: int, device: Any, folder: str, parallel: Parallel) -> Any:
    with with_operators(device, "ascend"):
        mesh = Mesh.create(parallel)
        model = Transformer(ModelConfig.from_hf(folder), mesh, device, torch.float64)
        load_weights(model, folder)
        config = rollout_config(max_length=256, max_seqs=4, max_batch_tokens=64, graphs=True)
        made = EmbeddedEngine(model, mesh, device, config, seed=5)
        made.allocate_kv()
        if rank == 0:
            made.submit(requests(9, 24))
        outputs, counters = made.run(), made.counters
        made.release_kv()
        return outputs, counters.graph_steps, counters.graphs_captured


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(2, ep=2),
        pytest.param(Parallel(2, tp=2), marks=pytest.mark.extended),
        pytest.param(Parallel(2, tp=2, ep=2), marks=pytest.mark.extended),
        pytest.param(Parallel(4, tp=2, ep=4), marks=pytest.mark.extended),
        pytest.param(Parallel(2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_ranks_of_an_engine_replay_the_same_steps(parallel):
    results = run_ranks(generate_rank, parallel.world, checkpoint(), parallel)
    outputs = [output for mine, *_ in results for output in mine]
    check_equal(outputs, generate(engine(checkpoint(), graphs=False), requests(9, 24)))
    assert all(steps > 5 for _, steps, _ in results)
    if parallel.ep > 1 or parallel.tp > 1:
        assert len({(steps, captured) for _, steps, captured in results}) == 1
