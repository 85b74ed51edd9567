"""718B parameters on 768 dies: what trainer and engine allocate is what the plan says, shown on meta tensors.

A meta tensor has a shape and no memory. The constructors of the model, the trainer with its optimizer, and the engine
with its KV cache run as on a card; a ledger counts the bytes of what they would allocate.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory, generation_bytes, training_bytes
from fusion.costmodel.presets import load_shape
from fusion.costmodel.setup import Setup, SwitchLimits
from fusion.inference import EmbeddedEngine, RolloutConfig
from fusion.model import Mesh, Parallel, Transformer
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from tests import machine
from tests.costmodel.meta_device import MetaDevice, meta_card
from tests.costmodel.test_shape import SHAPES

BUCKET_BYTES = 512 << 20
"""As in recipes/several_hosts.sh: an expert's matrices fit in an eighth of it"""
PANGU = Setup(
    load_shape("pangu_718b", SHAPES).shape,
    hardware_named("ascend_910c"),
    train=Parallel(768, tp=8, ep=8, pp=16),
    infer=Parallel(768, tp=8, ep=256),
    fusion=SwitchLimits(bucket_bytes=BUCKET_BYTES),
)
CONFIG = PANGU.shape.config
RANKS = (0, 383, 767)
PADDING = 1e-6
"""Of buckets to a multiple of their replicas, as a share of a die's bytes"""


@contextmanager
def bounded_card(seconds: float) -> Iterator[MetaDevice]:
    """A card of the plan's size; what happens on it takes at most these CPU seconds and a gigabyte of the host."""
    start_s, before_kb = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with meta_card(int(PANGU.hardware.usable_bytes)) as device:
        yield device
    assert machine.cpu_within(time.process_time() - start_s, seconds)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 1e6


@pytest.mark.parametrize("rank", RANKS)
def test_a_die_that_trains_holds_what_the_plan_says(rank):
    planned = training_bytes(PANGU, PANGU.train.coordinate("pp", rank))
    with bounded_card(seconds=15) as device:
        model = Transformer(CONFIG, Mesh(PANGU.train, rank), device, torch.bfloat16, bucket_bytes=BUCKET_BYTES)
        trainer = EmbeddedTrainEngine(model, model.mesh, device, TrainingConfig(recompute=True))
        held = device.memory_by_owner()
    for owner in ("weights", "gradients", "optimizer"):
        assert held[owner] == pytest.approx(planned[owner], rel=PADDING)
    assert trainer.optimizer.device is device and not held["kv"]


@pytest.mark.parametrize("rank", RANKS)
def test_a_die_that_generates_holds_what_the_plan_says(rank):
    with bounded_card(seconds=5) as device:
        model = Transformer(CONFIG, Mesh(PANGU.infer, rank), device, torch.bfloat16, bucket_bytes=BUCKET_BYTES)
        engine = EmbeddedEngine(model, model.mesh, device, RolloutConfig())
        engine.allocate_kv()
        held = device.memory_by_owner()
    planned = estimate_memory(PANGU)
    assert held["weights"] == pytest.approx(generation_bytes(PANGU, 0)["weights"], rel=PADDING)
    assert held["kv"] == pytest.approx(planned.phases["infer"]["kv"], rel=0.01)
    assert engine.capacity_tokens == pytest.approx(planned.kv_tokens, rel=0.01)


def test_the_plan_reports_the_stage_that_holds_most():
    """That of rank 383 and, as it has as many sparse layers, of others."""
    reported, stage = estimate_memory(PANGU).phases["train"], PANGU.train.coordinate("pp", 383)
    for owner in ("weights", "gradients", "optimizer"):
        assert reported[owner] == training_bytes(PANGU, stage)[owner]
    assert reported["weights"] == max(training_bytes(PANGU, n)["weights"] for n in range(PANGU.train.pp))
