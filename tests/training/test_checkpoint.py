from __future__ import annotations

import json
import math
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.model import Parallel, global_params, local_params, save_folder
from fusion.model.gathering import gather_tensors
from fusion.npu.failures import AbortedOnAllRanks
from fusion.npu.operators import Plain
from fusion.offload import HostPool, StreamedStates
from fusion.telemetry import files as files_module
from fusion.telemetry.files import exchange, replace_folder
from fusion.training import AlgorithmConfig, load_checkpoint, save_checkpoint
from fusion.training.algorithms import make_algorithm
from fusion.training.chunk_files import Chunk, ChunkFolder, file_of, merge_tables, read_chunks, table_of, write_chunks
from fusion.training.chunk_reader import ChunkReader
from fusion.training.export import export_checkpoint
from fusion.training.interface import SKIPPED_IN_A_ROW
from fusion.training.shards import SharedElements, gradient_buckets, own_range, shard_pieces
from tests.helpers import run_ranks, tiny_checkpoint, tiny_config
from tests.stacked import Stacked
from tests.training.ranks import LONGEST, Case, make_engine, my_share, sample_batch

GRPO = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST).loss


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def step(engine: Any, seed: int) -> dict[str, float]:
    metrics = engine.forward_backward(my_share(sample_batch(8, seed), engine), GRPO)
    return metrics | engine.optimizer_step()


def interrupted(rank, device, case, folder):
    """Two steps after a checkpoint, by the engine that wrote it and by one that read it."""
    engine = make_engine(case, device)
    step(engine, 1)
    save_checkpoint(engine, folder)
    went_on = [step(engine, seed) for seed in (2, 3)]
    again = make_engine(case, device)
    load_checkpoint(again, folder)
    resumed = [step(again, seed) for seed in (2, 3)]
    left, right = engine.state_dict(), again.state_dict()
    equal = left["steps"] == right["steps"] and all(
        torch.equal(left["tensors"][name], right["tensors"][name]) for name in left["tensors"]
    )
    return went_on == resumed, equal


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(Parallel(4, 2, 2), "float32", marks=pytest.mark.extended),
        (Parallel(4, 2, 2, pp=2), "float32"),
        (Parallel(2, pp=2), "bfloat16"),
    ],
    ids=str,
)
def test_resume_is_bitwise(checkpoint, tmp_path, layout, dtype):
    case = Case(checkpoint, layout, {"warmup_steps": 3, "token_budget": 40}, dtype=dtype, bucket_bytes=20000)
    assert run_ranks(interrupted, layout.world, case, str(tmp_path / "trainer")) == [(True, True)] * layout.world
    assert [path.name for path in tmp_path.iterdir()] == ["trainer"]


def test_updates_that_are_skipped_in_a_row_are_counted_across_a_resume(checkpoint, device, tmp_path):
    def skipped(engine):
        engine.forward_backward(my_share(sample_batch(8, 1), engine), GRPO)
        next(iter(engine.gradients().values()))[3] = float("nan")
        return engine.optimizer_step()[SKIPPED_IN_A_ROW]

    engine, again = (make_engine(Case(checkpoint), device) for _ in range(2))
    assert [skipped(engine), skipped(engine)] == [1, 2]
    save_checkpoint(engine, tmp_path / "trainer")
    load_checkpoint(again, tmp_path / "trainer")
    assert skipped(again) == 3
    assert step(again, 2)[SKIPPED_IN_A_ROW] == 0


def test_states_on_the_host_are_saved_and_taken_up_by_a_trainer_that_keeps_them_in_hbm(checkpoint, device, tmp_path):
    case, pool = Case(checkpoint, dtype="bfloat16", bucket_bytes=20000), HostPool(device)
    pool.take([50 << 20])
    streams = make_engine(case, device, states=partial(StreamedStates, pool=pool))
    step(streams, 1)
    save_checkpoint(streams, tmp_path / "trainer")
    tensors = streams.state_dict()["tensors"]
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(path.stat().st_size for path in (tmp_path / "trainer").iterdir()) < 2 * nbytes
    resident = make_engine(case, device)
    load_checkpoint(resident, tmp_path / "trainer")
    assert all(torch.equal(tensors[name].cpu(), t.cpu()) for name, t in resident.state_dict()["tensors"].items())
    assert step(resident, 2) == step(streams, 2)


@pytest.mark.parametrize("tables", [(Plain(), Stacked()), (Stacked(), Plain())], ids=["to stacks", "from stacks"])
def test_a_card_that_stacks_experts_and_one_that_does_not_load_each_others_checkpoints(
    checkpoint, device, tmp_path, monkeypatch, tables
):
    case, states, steps = Case(checkpoint, bucket_bytes=20000), [], []
    for table, act in zip(tables, (save_checkpoint, load_checkpoint), strict=True):
        monkeypatch.setattr(device, "operators", table)
        engine = make_engine(case, device)
        assert bool(engine.model.weights.stacks) == table.stacks_experts
        if act is save_checkpoint:
            step(engine, 1)
        act(engine, tmp_path / "trainer")
        states.append(state_of(engine))
        steps.append(step(engine, 2))
    (_, weights, count), (_, again, count_again) = states
    assert count == count_again == 1 and weights.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    left, right = (whole([state]) for state in states)
    assert left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert steps[0] == pytest.approx(steps[1], rel=1e-5, abs=1e-7)


def save_state(rank, device, case, folder):
    """The global tensors and the weights that a trainer has saved, after one step."""
    engine = make_engine(case, device)
    step(engine, 1)
    save_checkpoint(engine, folder)
    return state_of(engine)


def load_state(rank, device, case, folder):
    """Those that another trainer has loaded, and whether all of its own elements, also those it does not own, are."""
    engine = make_engine(case, device)
    load_checkpoint(engine, folder)
    return state_of(engine)


def state_of(engine):
    chunks = [replace(one, tensor=one.tensor.cpu().clone()) for one in engine.chunks(engine.state_dict())]
    weights = {name: tensor for name, tensor in gather_tensors(engine.model) if tensor is not None}
    return chunks, weights, engine.optimizer.steps


def whole(states):
    """The global tensors that the chunks of all ranks are; every element has exactly one owner, and one value."""
    tensors, owners = {}, {}
    for owned in (True, False):
        for chunk in (chunk for chunks, _, _ in states for chunk in chunks if chunk.owned == owned):
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.tensor.shape, strict=True))
            if owned:
                tensors.setdefault(chunk.name, torch.full(chunk.shape, math.nan))[box] = chunk.tensor
                owners.setdefault(chunk.name, torch.zeros(chunk.shape))[box] += 1
            assert torch.equal(tensors[chunk.name][box], chunk.tensor), chunk.key
    assert all(bool((count == 1).all()) for count in owners.values())
    return tensors


TIED, UNTIED = {"num_hidden_layers": 4}, {"num_hidden_layers": 3, "tie_word_embeddings": False}
PAIRS = {
    "tp2ep2-tp2pp2": (TIED, "float32", Parallel(4, 2, 2), Parallel(4, 2, pp=2)),
    "pp4-one": (TIED, "float32", Parallel(4, pp=4), Parallel()),
    "one-tp2etp2ep2": (TIED, "float32", Parallel(), Parallel(4, 2, 2, etp=2)),
    "cp2tp2-cp4": (TIED, "float32", Parallel(4, tp=2, cp=2), Parallel(4, cp=4, ep=2)),
    "dp4-tp2ep2": (UNTIED, "bfloat16", Parallel(4), Parallel(2, 2, 2)),
    "tp4-pp3": (UNTIED, "bfloat16", Parallel(4, 4), Parallel(3, pp=3)),
    "pp2ep2-dp3": (TIED, "bfloat16", Parallel(4, ep=2, pp=2), Parallel(3)),
}


@pytest.mark.parametrize(
    "pair",
    ["tp2ep2-tp2pp2"] + [pytest.param(pair, marks=pytest.mark.extended) for pair in PAIRS if pair != "tp2ep2-tp2pp2"],
)
def test_another_layout_and_number_of_cards_loads_the_same_global_tensors_to_the_bit(tmp_path, pair):
    changes, dtype, before, after = PAIRS[pair]
    cases = [
        Case(tiny_checkpoint(tmp_path / "model", **changes), layout, dtype=dtype, bucket_bytes=bucket_bytes)
        for layout, bucket_bytes in ((before, 3000), (after, 20000))
    ]
    folder = str(tmp_path / "trainer")
    saved = run_ranks(save_state, before.world, cases[0], folder)
    loaded = run_ranks(load_state, after.world, cases[1], folder)
    ours, theirs = whole(loaded), whole(saved)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert saved[0][1].keys() == loaded[0][1].keys()
    assert all(torch.equal(saved[0][1][name], loaded[0][1][name]) for name in saved[0][1]), "the weights, too"
    assert {steps for _, _, steps in saved + loaded} == {1}
    assert not any(path.suffix in (".pt", ".pkl", ".distcp") for path in Path(folder).iterdir())


LAYOUTS = st.builds(
    lambda tp, ep, etp, pp, replicas: Parallel(8 * replicas * pp, tp, ep, pp=pp, etp=etp),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
)


def pure_chunks(config, parallel, bucket_bytes, fill):
    """The chunks of every rank of a layout, without a trainer: ``fill`` gives the tensor of a name and a box."""
    shapes = global_params(config)
    for rank in range(parallel.world):
        group = next(group for group in parallel.groups("tp") if rank in group)
        tables = [local_params(config, parallel, one, 400) for one in group]
        shared = SharedElements(tables, parallel.coordinate("tp", rank))
        plans, tied = gradient_buckets(config, parallel, tables[group.index(rank)], bucket_bytes)
        chunks = []
        for index, plan in enumerate(plans):
            copied = index >= len(plans) - tied and parallel.coordinate("pp", rank) == 0
            for piece in shard_pieces(plan, *own_range(plan, parallel, rank)):
                for box in shared.boxes(piece):
                    offset, tensor = tuple(start for start, _ in box.region), fill(box.name, box.region)
                    chunks.append(Chunk(box.name, shapes[box.name], offset, tensor, box.owned and not copied))
        yield chunks


@settings(max_examples=15)
@given(LAYOUTS, LAYOUTS, st.booleans(), st.booleans(), st.sampled_from([500, 4000, 1 << 20]))
def test_any_layout_reads_what_any_layout_has_written(before, after, experts, tied, bucket_bytes):
    """Property, without processes: files of every rank of a layout, read by every rank of another."""
    moe = {"num_experts": 4, "moe_intermediate_size": 8} if experts else {}
    size = {"hidden_size": 8, "num_attention_heads": 4, "head_dim": 4, "intermediate_size": 12, "num_hidden_layers": 3}
    config = tiny_config(experts, tie_word_embeddings=tied, vocab_size=16, **size, **moe)
    before, after = (
        layout if experts else Parallel(layout.world, layout.tp, pp=layout.pp) for layout in (before, after)
    )
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in global_params(config).items()}

    def box_of(name, region):
        return tensors[name][tuple(slice(*side) for side in region)].contiguous()

    def empty(name, region):
        return torch.full_like(box_of(name, region), math.nan)

    with tempfile.TemporaryDirectory() as folder:
        tables, sizes = [], 0
        for rank, chunks in enumerate(pure_chunks(config, before, bucket_bytes, box_of)):
            owned = [chunk for chunk in chunks if chunk.owned]
            write_chunks(Path(folder) / file_of(rank), owned)
            tables.append(table_of(rank, owned))
            sizes += sum(chunk.tensor.numel() for chunk in owned)
        assert sizes == sum(tensor.numel() for tensor in tensors.values()), "every element is written once"
        (Path(folder) / "tensors.json").write_text(json.dumps(merge_tables(tables)))
        reader = ChunkFolder(folder)
        for chunks in pure_chunks(config, after, 2 * bucket_bytes, empty):
            read_chunks(reader, chunks)
            for chunk in chunks:
                region = tuple((at, at + length) for at, length in zip(chunk.offset, chunk.tensor.shape, strict=True))
                assert torch.equal(chunk.tensor, box_of(chunk.name, region))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_loads_it_too(checkpoint, device, tmp_path):
    engine = make_engine(Case(checkpoint, bucket_bytes=3000), device)
    step(engine, 1)
    save_checkpoint(engine, tmp_path / "trainer")
    tensors = whole([state_of(engine)])
    loaded = {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()}
    torch.distributed.checkpoint.load(loaded, storage_reader=ChunkReader(tmp_path / "trainer"), no_dist=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_another_dtype_or_model_is_refused(checkpoint, device, tmp_path):
    folder = tmp_path / "trainer"
    save_checkpoint(make_engine(Case(checkpoint), device), folder)
    with pytest.raises(ValueError, match="model.dtype=bfloat16: .* was saved with model.dtype=float32"):
        load_checkpoint(make_engine(Case(checkpoint, dtype="bfloat16"), device), folder)
    other = tiny_checkpoint(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ValueError, match="was saved by a model with num_hidden_layers=2; this run's has 3"):
        load_checkpoint(make_engine(Case(other), device), folder)
    with pytest.raises(ValueError, match=r"holds no trainer checkpoint \(trainer.json is missing\)"):
        load_checkpoint(make_engine(Case(checkpoint), device), tmp_path)
    (folder / "tensors.json").unlink()
    with pytest.raises(ValueError, match="was written by an earlier version"):
        load_checkpoint(make_engine(Case(checkpoint), device), folder)


def load_damaged(rank, device, case, folder):
    try:
        load_checkpoint(make_engine(case, device), folder)
    except AbortedOnAllRanks as error:
        return str(error)


def test_every_rank_learns_of_a_damaged_file_that_one_has_read(checkpoint, tmp_path):
    folder, case = tmp_path / "trainer", Case(checkpoint, Parallel(2, pp=2))
    run_ranks(save_state, 2, case, str(folder))
    flip(folder / "rank-00001.safetensors", 10_000)
    told = run_ranks(load_damaged, 2, case, str(folder))
    assert told[0] == told[1] and "rank-00001.safetensors does not match its digest" in told[0]


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_an_export_is_the_model_that_was_saved(checkpoint, device, tmp_path):
    engine = make_engine(Case(checkpoint, dtype="bfloat16", bucket_bytes=3000), device)
    step(engine, 1)
    engine.model.config = replace(engine.model.config, masked_ids=((20, 22), (31, 32)), eos_token_ids=(1, 2))
    save_checkpoint(engine, tmp_path / "trainer")
    save_folder(engine.model, tmp_path / "direct")
    export_checkpoint(tmp_path / "trainer", tmp_path / "exported")
    direct, exported = ({p.name: p.read_bytes() for p in (tmp_path / one).iterdir()} for one in ("direct", "exported"))
    assert direct == exported
    generation = json.loads(exported["generation_config.json"])
    assert (generation["suppress_tokens"], generation["eos_token_id"]) == ([20, 21, 31], [1, 2])


def _folder(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_by_name(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr("fusion.telemetry.files.exchange", lambda one, other: False)
    folder = tmp_path / "hf"
    for content in ("first", "second", "third"):
        replace_folder(_folder(tmp_path / "hf.partial", content), folder)
        assert (folder / "file").read_text() == content and [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_at_no_time_there_is_no_folder(tmp_path, monkeypatch):
    """A crash is simulated at every rename, exchange and removal: the folder is there, and whole, whenever it is."""
    new, folder = _folder(tmp_path / "hf.partial", "new"), _folder(tmp_path / "hf", "old")
    if not exchange(new, folder):
        pytest.skip("this file system cannot exchange folders")
    exchange(new, folder)
    seen = []

    def look():
        seen.append((folder / "file").read_text())

    for owner, name in (
        (Path, "rename"),
        (shutil, "rmtree"),
        (files_module, "exchange"),
        (files_module, "sync"),
    ):
        monkeypatch.setattr(owner, name, looked_around(getattr(owner, name), look))
    replace_folder(new, folder)
    assert seen == sorted(seen, reverse=True) and {*seen} == {"old", "new"} and not new.exists()


def looked_around(operation, look):
    def call(*args, **options):
        look()
        result = operation(*args, **options)
        look()
        return result

    return call


def test_what_cannot_be_exchanged_is_an_error_not_a_fallback(tmp_path):
    with pytest.raises(FileNotFoundError):
        exchange(_folder(tmp_path / "one", ""), tmp_path / "other")


def test_a_broken_write_leaves_the_last_checkpoint(checkpoint, device, tmp_path):
    engine, folder = make_engine(Case(checkpoint), device), tmp_path / "trainer"
    save_checkpoint(engine, folder)
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    step(engine, 1)
    engine.state_dict = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(engine, folder)
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == written
    del engine.state_dict
    save_checkpoint(engine, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"trainer"}
    fresh = make_engine(Case(checkpoint), device)
    load_checkpoint(fresh, folder)
    assert fresh.optimizer.steps == 1
