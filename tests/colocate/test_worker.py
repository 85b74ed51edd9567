"""One card, in this process, through its phases, with a real queue."""

from dataclasses import replace
from math import prod

import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from fusion.colocate import Deployment, FusionConfig, PhaseError, Worker, WorkerSpec
from fusion.ep_switch import weights_checksum
from fusion.inference import Request, RolloutConfig
from fusion.model import Parallel, global_params
from fusion.model.options import PolicyModelConfig
from fusion.npu import AbortedOnAllRanks, DeviceConfig, OutOfMemory
from fusion.training import AlgorithmConfig, TrainingConfig
from tests.helpers import tiny_checkpoint

GROUP = 4


@pytest.fixture
def worker(tmp_path):
    return _worker(tiny_checkpoint(tmp_path))


def _worker(path, dtype="float32", algorithm=None, **fusion):
    spec = WorkerSpec(
        seed=5,
        steps=10,
        model=PolicyModelConfig(path=path, dtype=dtype),
        deployment=Deployment((0,), (0,), reference=(0,)),
        train=Parallel(),
        infer=Parallel(),
        fusion=FusionConfig(**{"bucket_bytes": 1 << 14, "checksum": True} | fusion),
        rollout=RolloutConfig(max_response_length=6, max_length=64),
        training=TrainingConfig(lr=1e-3),
        algorithm=AlgorithmConfig(**(algorithm or {"kl_coef": 0.1, "group_size": GROUP})),
        device=DeviceConfig("emulated", capacity_bytes=64 << 20),
    )
    worker = Worker(spec, 0, LocalQueue(["train"]))
    worker.prepare("")
    return worker


def _generate(worker, version, keep=False):
    params = worker.spec.rollout.sampling_params()
    requests = [
        Request(f"{version}-{g}/{k}", (3 + g, 4, 5), params, group=f"{version}-{g}")
        for g in range(2)
        for k in range(GROUP)
    ]
    worker.answer(requests) if keep else worker.generate(requests, stay=False)
    return [request.id for request in requests]


def _one_step(worker, version):
    worker.switch("infer", version)
    ids = _generate(worker, version)
    worker.queue.put(PackedBatch.from_samples(ids, {"advantage": torch.linspace(-1, 1, len(ids))}))
    worker.switch("train", version)
    worker.reference(ids)
    report = worker.train([ids])
    return ids, report


def test_a_card_is_opened_as_the_config_says(worker, monkeypatch):
    class Opened(Exception):
        pass

    def open_device(kind, **options):
        raise Opened(kind, options)

    monkeypatch.setattr("fusion.colocate.loaded_worker.open_device", open_device)
    options = dict(capacity_bytes=1 << 20, streams="timed", operators="plain", deterministic=True)
    device = DeviceConfig("emulated", **options, host_bytes_per_s=2e9, wire_bytes_per_s=3e9)
    with pytest.raises(Opened) as opened:
        Worker(replace(worker.spec, device=device), 0, worker.queue).prepare("")
    assert opened.value.args == ("emulated", options | {"rates": (2e9, 3e9)})


def test_a_step_trains_on_what_was_generated_and_memory_changes_hands(worker):
    before = weights_checksum(worker.card.weights.train)
    worker.switch("infer", 0)
    held = worker.card.device.memory_by_owner()
    assert held["optimizer"] == held["gradients"] == 0 and held["kv"] > 0, "generation has the card to itself"
    assert worker.card.weights.infer.weights.resident
    assert held["weights"] < 1.1 * worker.card.weights.train.weights.nbytes, "one card, equal layouts: stored once"
    worker.switch("train", 0)
    assert worker.card.device.memory_by_owner()["kv"] == 0
    assert weights_checksum(worker.card.weights.train) == before, "there and back, bit for bit"

    ids, report = _one_step(worker, 0)
    figures = {name: part.value / (part.weight or 1) for name, part in report.metrics.items()}
    assert figures["training/rollout_probs_diff_mean"] < 1e-6, "the engine's logprobs are the trainer's"
    assert abs(figures["actor/kl_loss"]) < 1e-6, "before the first update the policy is the reference"
    assert weights_checksum(worker.card.weights.train) != before
    _, later = _one_step(worker, 1)
    assert later.metrics["actor/kl_loss"].value > 1e-6, "the reference stays where the run began"
    columns = worker.queue.read(ids, ["response", "behaviour_logprobs", "ref_logprobs", "versions"])
    assert columns["response"].lengths().tolist() == columns["ref_logprobs"].lengths().tolist()
    assert torch.allclose(columns["behaviour_logprobs"].buffer, columns["ref_logprobs"].buffer, atol=1e-5)


def _with_algorithm(path, **keys):
    worker = _worker(path, algorithm={"kl_coef": 0.1, "group_size": GROUP} | keys)
    worker.switch("infer", 0)
    ids = _generate(worker, 0)
    worker.queue.put(PackedBatch.from_samples(ids, {"advantage": torch.linspace(-1, 1, len(ids))}))
    worker.switch("train", 0)
    return worker, ids


def test_decoupled_takes_the_proximal_policy_before_the_first_of_several_updates(tmp_path):
    path, clipped, ess = tiny_checkpoint(tmp_path), {}, "rollout_corr/rollout_is_eff_sample_size"
    for correction in ("decoupled", "tis_token"):
        worker, ids = _with_algorithm(path, correction=correction)
        worker.reference(ids)
        report = worker.train([ids, ids], 2)
        figures = {name: part.value / (part.weight or 1) for name, part in report.metrics.items()}
        assert figures["staleness/2/token_fraction"] == 1, "version 0 sampled what version 2 is trained on"
        assert figures["training/rollout_logprobs_diff_mean"] < 1e-5, "no drift of the step's first update in it"
        assert figures["training/inner_step_logprobs_diff_mean"] > 1e-3 and figures[ess] == pytest.approx(1, abs=1e-5)
        clipped[correction] = figures["actor/ratio_mean"]
    assert clipped["tis_token"] == 1, "against the policy of each minibatch itself"
    assert abs(clipped["decoupled"] - 1) > 1e-6, "against the policy before the step"


def test_the_divergence_of_every_sample_comes_back_for_its_reward(tmp_path):
    worker, ids = _with_algorithm(tiny_checkpoint(tmp_path), kl_in="reward")
    with torch.no_grad():
        for flat in worker.card.weights.train.weights.flats:
            flat.mul_(1.1)
    worker.switch("infer", 1)
    more = _generate(worker, 1)
    worker.switch("train", 1)
    found = worker.reference(more).reference_kl
    columns = worker.queue.read(more, ["behaviour_logprobs", "ref_logprobs"])
    assert list(found) == more
    for row, id in enumerate(more):
        wanted = float((columns["behaviour_logprobs"][row] - columns["ref_logprobs"][row]).sum())
        assert abs(found[id] - wanted) < 1e-5
    assert any(abs(kl) > 1e-4 for kl in found.values())
    assert "actor/kl_loss" not in worker.train([ids]).metrics, "no column of the reference is needed to train"


@pytest.mark.parametrize(
    ("dtype", "offload"), [("float32", "switch"), ("bfloat16", "switch"), ("bfloat16", "stream"), ("float32", "none")]
)
def test_what_was_copied_is_written_whatever_training_does_meanwhile_and_brought_back(tmp_path, dtype, offload):
    worker = _worker(tiny_checkpoint(tmp_path), dtype, offload=offload)
    _one_step(worker, 0)
    held = worker.card.device.memory().allocated
    worker.snapshot()
    assert worker.card.device.memory().allocated <= held, "the copy is the host's"
    saved = {name: tensor.cpu().clone() for name, tensor in worker.card.switcher.training_state()["tensors"].items()}
    steps = worker.card.trainer.optimizer.steps
    with pytest.raises(AssertionError, match="not been written yet"):
        worker.snapshot()
    _one_step(worker, 1)
    changed = worker.card.switcher.training_state()["tensors"]
    assert not any(torch.equal(changed[name].cpu(), saved[name]) for name in saved if name.startswith("exp_avg"))
    worker.save(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    nbytes = 12 * sum(prod(shape) for shape in global_params(worker.card.weights.train.config).values())
    assert nbytes < (tmp_path / "checkpoint" / "rank-00000.safetensors").stat().st_size < 1.5 * nbytes + 50_000
    worker.restore(str(tmp_path / "checkpoint"))
    assert worker.card.trainer.optimizer.steps == steps
    for name, tensor in worker.card.switcher.training_state()["tensors"].items():
        assert torch.equal(tensor.cpu(), saved[name]), name
    again = _worker(str(tmp_path / "hf"), dtype, offload=offload)
    trained = worker.card.weights.train.weights
    for theirs, ours in zip(again.card.weights.train.weights.flats, trained.flats, strict=True):
        assert torch.equal(theirs.cpu(), ours.cpu()), "the export is of the same instant"


def test_work_in_the_wrong_phase_is_refused(worker):
    with pytest.raises(PhaseError, match="cannot generate in phase train"):
        worker.generate([])
    worker.switch("infer", 0)
    with pytest.raises(PhaseError, match="cannot train in phase infer"):
        worker.train([])
    with pytest.raises(
        AbortedOnAllRanks, match="rank 0 failed in phase: PhaseError: .* cannot switch from infer to infer"
    ):
        worker.switch("infer", 0)


def test_control_is_answered(worker):
    worker.switch("infer", 0)
    status = worker.status()
    assert status["rank"] == 0 and status["phase"] == "infer" and status["running"] == 0


def _fill(worker, leave):
    """Takes all of the card but so many bytes, for as long as the result lives."""
    device = worker.card.device
    return torch.empty(device.memory().free - leave, dtype=torch.uint8, device=device.torch_device)


def test_who_runs_out_of_memory_says_in_which_stage_and_who_held_it(worker):
    worker.switch("infer", 0)
    hog = _fill(worker, 1 << 10)
    with pytest.raises(OutOfMemory, match=r"in stage 'generate'; HBM by owner: weights 0.[23] MiB.* kv \d+\.\d MiB"):
        _generate(worker, 0)
    del hog


def test_an_optimizer_that_finds_no_room_behind_a_switch_says_so_too(tmp_path):
    path = tiny_checkpoint(tmp_path, vocab_size=40_000)
    worker = _worker(path, deployment="full", resident="all", bucket_bytes=1 << 20)
    worker.switch("infer", 0)
    optimizer_bytes = sum(part.nbytes for part in worker.card.switcher.optimizer.values())
    assert worker.card.device.memory_by_owner()["kv"] < optimizer_bytes
    hog = _fill(worker, 1 << 10)
    with pytest.raises(
        OutOfMemory, match="rank 0 is out of memory in stage 'switch to train', optimizer; HBM by owner: weights"
    ):
        worker.switch("train", 0)
    del hog


def test_a_role_that_finds_no_room_leaves_the_card_broken(worker):
    ids, _ = _one_step(worker, 0)
    worker.switch("infer", 1)
    hog = _fill(worker, 1 << 10)
    worker.switch("train", 1)
    del hog
    hog = _fill(worker, 1 << 10)
    with pytest.raises(OutOfMemory, match="in stage 'reference', to reference; HBM by owner: weights"):
        worker.reference(ids)
    assert worker.phases.phase.value == "broken"
    with pytest.raises(PhaseError, match="cannot train in phase broken"):
        worker.train([ids])
    del hog


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_the_optimizer_lives_changes_no_bit(tmp_path, dtype):
    path, found = tiny_checkpoint(tmp_path), {}
    for offload in ("none", "switch", "stream"):
        worker = _worker(path, dtype, offload=offload)
        held = []
        for version in range(2):
            _, report = _one_step(worker, version)
            held.append(report.memory.by_owner["train"]["optimizer"])
        worker.switch("infer", 2)
        generating = worker.card.device.memory_by_owner()["optimizer"]
        assert (generating > 0) == (offload == "none") and (min(held) > 0) == (offload != "stream")
        found[offload] = weights_checksum(worker.card.weights.infer)
    assert len(set(found.values())) == 1, found
