"""Emulated cards that take modelled time, each in this process; whole runs are in tests/stalesync/test_paced_run.py."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from distqueue.payload.sweep import memory
from fusion.colocate import Deployment, FusionConfig, Worker, WorkerSpec
from fusion.colocate.paced import PacedEngine, common_prompts, observe_load
from fusion.costmodel.pace import EngineCost, Pace, TrainerCost
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.inference.verification import Draft
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.model.options import PolicyModelConfig
from fusion.npu import DeviceConfig, open_device
from fusion.npu.pacer import CATCH_UP_S, Pacer
from fusion.offload import HostPool
from fusion.resources import SHAPES
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.telemetry import summarize
from fusion.training import AlgorithmConfig, TrainingConfig
from tests.helpers import tiny_checkpoint
from tests.inference.engines import generate, requests, tokens
from tests.machine import patience, within
from tests.rollout.drafts.plain_indexes import PlainIndexes
from tests.rollouts import rollout_config
from tests.training.sequences import sequences_of

CAPACITY = 64 << 20
DEVICE = DeviceConfig("emulated", pace="qwen3_30b_a3b")


def _pace(count=1, speed=1.0):
    return Pace.load(replace(DEVICE, pace_tokens=count, pace_speed=speed), "ascend_910c", SHAPES)


@pytest.fixture
def model(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    card = open_device("emulated", capacity_bytes=CAPACITY)
    made = Transformer(ModelConfig.from_hf(folder), Mesh.single(), card, torch.float32)
    load_weights(made, folder)
    return made


def _engine(model, pace=None, memory=None, store=None):
    kept = "pool" if store else "keep" if memory else "recompute"
    config = rollout_config(max_length=256, max_seqs=64, max_batch_tokens=512, max_kv_tokens=8192, suspended=kept)
    given = model, Mesh.single(), model.device, config, 5, False, memory
    cost = pace and EngineCost(pace, Parallel(), config.engine.max_seqs)
    made = PacedEngine(*given, pacer=Pacer(), cost=cost, kv_store=store) if pace else EmbeddedEngine(*given)
    made.allocate_kv()
    return made


def test_decode_steps_take_the_modelled_time(model):
    made, steps = _engine(model, _pace(speed=0.5)), 24
    made.submit([Request(f"r{n}", (3, 4, 5), SamplingParams(max_tokens=99), exact_tokens=99) for n in range(4)])
    made.step()
    wanted, start, before = 0.0, time.perf_counter(), made.pacer.modelled_s.copy()
    for _ in range(steps):
        kv = sum(seq.computed + 1 for seq in made.scheduler.running)
        wanted += made.cost.roofline.engine_step_s(4, kv) / 0.5
        made.step()
    took = time.perf_counter() - start
    assert wanted / steps > 0.02, "a step that the host can hide its own work in"
    assert made.pacer.modelled_s["decode"] - before["decode"] == pytest.approx(wanted)
    lost = sum(made.pacer.overrun_s.values())  # 0 but on a host that is too busy to wake up in time
    assert took == pytest.approx(wanted + lost, rel=0.05) and took >= wanted - CATCH_UP_S
    assert made.pacer.ideal_s["decode"] < 0.6 * made.pacer.modelled_s["decode"], "4 of 64 sequences: mostly unfilled"


def test_a_pace_that_the_host_cannot_keep_is_told_as_overrun(model):
    made = _engine(model, _pace(speed=1e6))
    with made.pacer.stage():
        start = time.perf_counter()
        generate(made, requests(6))
        took = time.perf_counter() - start
    late = sum(made.pacer.overrun_s.values())  # but for what a next sleep could make up
    assert took - CATCH_UP_S - 0.05 * took <= late <= took
    assert sum(made.pacer.modelled_s.values()) < 0.01 * took


def test_a_pace_changes_no_token(model):
    wanted = requests(6)
    assert tokens(generate(_engine(model, _pace(speed=1e6)), wanted)) == tokens(generate(_engine(model), wanted))


def test_a_token_stands_for_many_and_a_second_for_many(model):
    """One that stands for 8: as 8 decode steps with contexts 8 times as long, 8 times as fast."""
    steps = {}
    for count, speed in ((1, 1.0), (8, 1.0), (8, 8.0)):
        made = _engine(model, _pace(count, speed))
        made.submit(requests(3, max_tokens=4))
        seconds = []
        schedule = made.scheduler.schedule
        made._take_orders()
        step = schedule()
        seconds.append(made.cost(observe_load(step))[0])
        made.scheduler.commit(step, [2] * len(step.sampled), [0.0] * len(step.sampled))
        seconds.append(made.cost(observe_load(schedule()))[0])
        steps[count, speed] = seconds
    first, later = steps[1, 1.0]
    assert set(first) == {"prefill"} and set(later) == {"decode"}, "the first token comes with the prefill"
    assert set(steps[8, 1.0][0]) == {"prefill", "decode"}, "which brings one of the 8; the others are decoded"
    assert 8 * later["decode"] < steps[8, 1.0][1]["decode"] < 9 * later["decode"]
    assert steps[8, 8.0][1]["decode"] == pytest.approx(steps[8, 1.0][1]["decode"] / 8)


def test_a_draft_is_verified_in_the_time_of_a_decode_step_and_of_its_tokens_computed_beside_it(model):
    """Nearly free on a card bound by bandwidth."""
    said = [5, 6, 7, 8, 9, 10, 11]

    class Sure(TextDrafter):
        def draft(self, sequences, max_depth, max_tokens):
            return [Draft(said, range(-1, len(said) - 1)) for _ in sequences] if self.drafts else [None] * 4

        def observe(self, verified): ...

    seconds = {}
    for drafts in (False, True):
        made = _engine(model, _pace())
        made.scheduler.drafter = drafter = Sure(PlainIndexes())
        made.submit([Request(f"r{n}", (3, 4, 5), SamplingParams(max_tokens=99), exact_tokens=99) for n in range(4)])
        drafter.drafts = drafts
        made.step()
        before = made.pacer.modelled_s["decode"]
        made.step()
        seconds[drafts] = made.pacer.modelled_s["decode"] - before
    roofline, pairs = made.cost.roofline, 4 * sum(4 + n + 1 for n in range(len(said)))
    wanted = roofline.engine_step_s(4, 4 * 4, prefill_tokens=4 * len(said), attended=pairs)
    assert seconds[True] == pytest.approx(wanted)
    assert seconds[False] < seconds[True] < 3 * seconds[False], "for up to 8 times the tokens"


@pytest.fixture
def shared_memory():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        yield Path(folder)


@pytest.mark.parametrize("pooled", [False, True])
def test_kv_goes_to_the_host_and_comes_back_in_the_time_of_the_cards_link(model, shared_memory, pooled):
    store = KVFiles(KVPoolSpec("run"), 0, shared_memory) if pooled else None
    made = _engine(model, _pace(16, 1e3), HostPool(model.device), store)
    request = Request("r0", (3, 4, 5) * 20, SamplingParams(max_tokens=99), exact_tokens=99)
    made.submit([request])
    made.step()
    (output,) = made.suspend()
    nbytes = 64 * 16 * made.cost.pace.shape.kv_bytes(1)  # four blocks of the run's tokens, each of which is 16
    link = made.cost.pace.hardware
    out = made.pacer.modelled_s["kv"]
    assert out == pytest.approx(nbytes / link.out_bytes_per_s.value / 1e3)
    made.release_kv()
    made.allocate_kv()
    made.resume()
    made.submit([replace(request, response=tuple(output.tokens), kv_rank=0, kv_tokens=output.kv_tokens)])
    made.step()
    assert made.pacer.modelled_s["kv"] - out == pytest.approx(nbytes / link.back_bytes_per_s.value / 1e3)
    assert made.pacer.ideal_s["kv"] == 0


def test_training_costs_by_tokens_and_their_contexts():
    cost = TrainerCost(_pace(4), Parallel(2))
    lengths, halved = [4000, 1000], [2000, 2000, 500, 500]
    assert cost.train(halved)["train"] < cost.train(lengths)["train"], "half the contexts"
    assert TrainerCost(_pace(8), Parallel(2)).train(halved)["train"] > cost.train(lengths)["train"] * (1 - 1e-9)
    assert cost.train([])["train"] == 0 < cost.forward(lengths, "logprobs")["logprobs"] < cost.train(lengths)["train"]


def test_a_paced_pass_shares_the_prompts_of_siblings_and_no_tokens_of_responses():
    prompts, responses = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4]], [[5, 6, 7], [5, 6], [], [8]]
    assert common_prompts(sequences_of(prompts, responses), Mesh.single()) == [0, 3, 2, 3]


def _worker(path, speed):
    device = replace(DEVICE, pace_speed=speed, capacity_bytes=CAPACITY)
    spec = WorkerSpec(
        seed=5,
        steps=10,
        model=PolicyModelConfig(path=path),
        deployment=Deployment((0,), (0,), reference=(0,)),
        train=Parallel(),
        infer=Parallel(),
        fusion=FusionConfig(bucket_bytes=1 << 14),
        rollout=RolloutConfig(max_response_length=6, max_length=64),
        training=TrainingConfig(lr=1e-3),
        algorithm=AlgorithmConfig(kl_coef=0.1, group_size=4),
        device=device,
        pace=Pace.load(device, "ascend_910c", SHAPES),
    )
    worker = Worker(spec, 0, LocalQueue(["train"]))
    worker.prepare("")
    return worker


def test_every_stage_of_a_card_takes_modelled_time_and_tells_it(tmp_path):
    worker, kinds, stages, shown = _worker(tiny_checkpoint(tmp_path), speed=4.0), {}, {}, {}

    def staged(name, *args):
        start = time.perf_counter()
        report = getattr(worker, name)(*args)
        took = time.perf_counter() - start
        parts = {n: p.value for n, p in report.metrics.items() if n.startswith("pace/") and p.rule == "sum"}
        assert took == pytest.approx(
            sum(v for n, v in parts.items() if "/ideal_s/" not in n), rel=0.05, abs=patience(0.05)
        )
        stages[name] = {n.removeprefix("pace/modelled_s/") for n in parts if n.startswith("pace/modelled_s/")}
        kinds.update(parts)
        for card in summarize(report.spans):
            shown.update({kind: length_ns / 1e9 for kind, length_ns in card.by_kind_ns.items()})

    ids = [f"0/{n}" for n in range(4)]
    params = worker.spec.rollout.sampling_params()
    staged("switch", "infer", 0)
    staged("generate", [Request(id, (3, 4), params, group="0", exact_tokens=5) for id in ids], False)
    worker.queue.put(PackedBatch.from_samples(ids, {"advantage": torch.linspace(-1, 1, len(ids))}))
    staged("switch", "train", 0)
    staged("reference", ids)
    staged("train", [ids])
    assert stages == {
        "switch": {"switch"},
        "generate": {"decode", "prefill"},
        "reference": {"logprobs"},
        "train": {"train", "optimizer", "onload"},
    }
    assert kinds["pace/ideal_s/decode"] < kinds["pace/modelled_s/decode"]
    modelled = {n.removeprefix("pace/modelled_s/"): v for n, v in kinds.items() if "/modelled_s/" in n}
    generating = modelled["decode"] + modelled["prefill"]
    overrun_s = sum(v for n, v in kinds.items() if n.startswith("pace/overrun_s/"))
    shown_s = shown["decode"] + shown["prefill"]
    assert 0.95 * generating - 0.05 <= shown_s <= 1.05 * generating + overrun_s + patience(0.05), "with its sleep"
    assert shown["train"] + shown["optimizer"] >= 0.95 * (modelled["train"] + modelled["optimizer"])


def test_a_sleep_does_not_hold_up_the_control_channel(tmp_path):
    worker = _worker(tiny_checkpoint(tmp_path), speed=0.1)
    worker.card.switcher.cost = replace(worker.card.switcher.cost, infer_s=0.0)
    worker.switch("infer", 0)
    params = SamplingParams(max_tokens=6)
    stage = threading.Thread(target=worker.answer, args=([Request("0/0", (3, 4), params, exact_tokens=3)],))
    stage.start()
    slowest, asked = 0.0, 0
    while stage.is_alive():
        start = time.perf_counter()
        assert worker.status()["rank"] == 0
        slowest, asked = max(slowest, time.perf_counter() - start), asked + 1
        time.sleep(0.01)
    assert asked > 20 and within(slowest, 0.3), "steps take half a second"
