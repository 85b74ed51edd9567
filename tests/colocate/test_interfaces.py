"""What colocation and rollout ask of a trainer and an engine is what their interfaces say: no more, and no less."""

from __future__ import annotations

import ast
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import fusion
from distqueue import LocalQueue, PackedBatch
from fusion.colocate import Deployment, FusionConfig, Worker, WorkerSpec
from fusion.colocate.parts import WorkerParts
from fusion.inference import InferEngine, Request, RolloutConfig
from fusion.model import Parallel
from fusion.model.options import PolicyModelConfig
from fusion.npu import DeviceConfig
from fusion.training import AlgorithmConfig, TrainEngine, TrainingConfig
from tests.colocate.fakes import FakeEngine, FakeModel, FakeTrainer, first_weight
from tests.helpers import tiny_checkpoint

ROOT = Path(fusion.__file__).resolve().parents[1]

EXTEND_THE_EMBEDDED = {
    "fusion/colocate/parts.py",
    "fusion/colocate/paced.py",
    "stalesync/job/base_model.py",
    "stalesync/job/sft.py",
    "stalesync/smoke/model_checks.py",
}
"""The default parts, what paces them, a script's own training without a worker, and what compares the embedded programs
with each other on a card"""


@pytest.fixture
def worker(tmp_path):
    spec = WorkerSpec(
        seed=5,
        steps=10,
        model=PolicyModelConfig(path=tiny_checkpoint(tmp_path / "model")),
        deployment=Deployment((0,), (0,), reference=(0,)),
        train=Parallel(),
        infer=Parallel(),
        fusion=FusionConfig(bucket_bytes=1 << 14, checksum=True),
        rollout=RolloutConfig(max_response_length=6, max_length=64),
        training=TrainingConfig(),
        algorithm=AlgorithmConfig(kl_coef=0.1, group_size=2),
        device=DeviceConfig("emulated", capacity_bytes=64 << 20),
    )
    parts = WorkerParts(train_model=FakeModel, infer_model=FakeModel, trainer=FakeTrainer, engine=FakeEngine)
    worker = Worker(spec, 0, LocalQueue(["train"]), parts)
    worker.prepare("")
    return worker


def requests(version):
    return [Request(f"{version}/{i}", (3, 4, 5), group=str(version)) for i in range(4)]


def generate(worker, version):
    """One `generate` stage with the control calls of a run; returns the ids that finished."""
    reports = []
    first, *others = requests(version)
    stage = threading.Thread(target=lambda: reports.append(worker.generate([first])))
    stage.start()
    worker.submit(others)
    worker.abort(["nobody"])
    worker.forget(["nobody"])
    while worker.status()["generated_tokens"] < 8 * (version + 1):
        time.sleep(0.01)
    worker.pause()
    stage.join()
    assert worker.await_ended_chunks(60.0) == [] and reports[0].suspended == []
    return [request.id for request in requests(version)]


def test_fakes_that_only_satisfy_the_interfaces_drive_a_whole_worker(worker, tmp_path):
    initial = first_weight(worker.card.weights.train.weights)
    for version in range(2):
        worker.switch("infer", version)
        ids = generate(worker, version)
        worker.queue.put(PackedBatch.from_samples(ids, {"advantage": torch.ones(len(ids))}))
        worker.switch("train", version)
        worker.reference(ids)
        report = worker.train([ids[:2], ids[2:]], version)
        assert {"actor/loss", "actor/grad_norm"} <= set(report.metrics)
        found = worker.queue.read(ids, ["response", "versions", "ref_logprobs"])
        token = round(initial + 2 * version)
        assert found["response"].buffer.tolist() == [token] * 8, "the engine had the trainer's weights"
        assert found["versions"].buffer.tolist() == [version] * 8
        torch.testing.assert_close(found["ref_logprobs"].buffer, torch.full((8,), -initial)), "the run's first weights"
    worker.snapshot()
    worker.save(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    trained = first_weight(worker.card.weights.train.weights)
    assert abs(trained - initial - 4) < 1e-5
    worker.switch("infer", 2)
    worker.switch("train", 2)
    worker.train([ids])
    worker.restore(str(tmp_path / "checkpoint"))
    assert first_weight(worker.card.weights.train.weights) == trained and worker.card.trainer.steps == 4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert float(exported["model.layers.0.input_layernorm.weight"][0]) > 4


def members(interface):
    named = {name for name in vars(interface) if not name.startswith("_")}
    return named | {name for name in vars(interface).get("__annotations__", ())}


def name_of(node):
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


@cache
def attributes_in(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]


def used(*variables):
    """Attributes that other rooms take of variables and attributes of these names, and in which files."""
    found = {}
    rooms = [ROOT / room for room in ("fusion/colocate", "fusion/rollout", "stalesync")]
    for path in (*(path for room in rooms for path in room.rglob("*.py")), ROOT / "fusion/training/checkpoint.py"):
        name = str(path.relative_to(ROOT))
        if name in EXTEND_THE_EMBEDDED or name.startswith("stalesync/simulator/"):  # whose engines are simulated
            continue
        for node in attributes_in(path):
            if name_of(node.value) in variables:
                of_config = name_of(getattr(node.value, "value", None)) in ("config", "rollout")  # rollout.engine
                if not of_config:
                    found.setdefault(node.attr, set()).add(name)
    return found


@pytest.mark.parametrize(
    ("interface", "variables"),
    [(InferEngine, ("engine", "_engine")), (TrainEngine, ("trainer", "_trainer"))],
)
def test_other_rooms_use_exactly_the_members_of_the_interface(interface, variables):
    found = used(*variables)
    assert not {name: files for name, files in found.items() if name not in members(interface)}, "reaches past it"
    assert not members(interface) - set(found), "asked for by nobody"


def test_only_the_default_parts_name_the_embedded_implementations():
    named = set()
    for room in ("fusion", "stalesync", "distqueue"):
        for path in (ROOT / room).rglob("*.py"):
            text, name = path.read_text(), str(path.relative_to(ROOT))
            if "Embedded" not in text:
                continue
            imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            if any(alias.name in ("EmbeddedEngine", "EmbeddedTrainEngine") for node in imports for alias in node.names):
                named.add(name)
    assert named <= EXTEND_THE_EMBEDDED | {"fusion/inference/__init__.py", "fusion/training/__init__.py"}, named
