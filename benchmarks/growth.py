"""Measure how the costs of a run grow: with groups, samples, sequences and steps.

controller: CPU of the whole controller per group of 8 samples, at 64 to 16,384 groups a step; cards and queue only hold
names, 64 engines of 256 sequences (`tests/stalesync/loop/named_cards.py`). queue: samples per second of puts, gets and
acks while 10k to 1M are held, and bytes a sample. decode: the host's part of a decode step at 1 to 1,024 sequences:
scheduler, batch, noise, sampler and bookkeeping; the engine is real, its model computes nothing, so what is left of a
step is everything but the model's own operations. memory: of each process of a run
that suspends, drafts, saves and evaluates, beside its floor, a Ray without any work; and bytes of its folder: means of
a tenth of the steps behind step 100, or half of them, and at the end.

Times are CPU times. How much longer this machine computes than the reference machine (`tests/machine.py`) is measured
beside each; figures and targets are of the reference machine.
"""

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Figures, Option, progress, resident_bytes, timed

BENCHMARK = Benchmark(
    __doc__,
    {
        "controller": "benchmarks.growth:controller",
        "queue": "benchmarks.growth:queue",
        "decode": "benchmarks.growth:decode",
        "memory": "benchmarks.growth_run:memory",
    },
    [
        Option("steps", 1000, smoke=6, help="of the run whose memory is measured"),
        Option("decode_steps", 60, smoke=2, help="of `decode`"),
    ],
    {
        "controller.*.us_a_group": "<= 50",
        "decode.us_at_64": "<= 1000",
        "decode.us_a_sequence": "<= 4",
        "memory.*.growth": "<= 0.02",
    },
    sizes={"groups": ((64, 256, 1024, 4096, 16384), (16, 64)), "min_groups": (8192, 64), "rounds": (3, 1)}
    | {"held": ((10_000, 100_000, 1_000_000), (1_000, 5_000)), "batch": (4096, 512)}
    | {"sequences": ((1, 8, 64, 256, 1024), (1, 8, 64))},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

import torch

from benchmarks.engine import SHAPES
from benchmarks.models import PlainCpu, engine_of
from benchmarks.runs import temporary_folder
from distqueue import LocalQueue, PackedBatch
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer
from stalesync.process.garbage import collecting_seldom
from tests.machine import Speed
from tests.stalesync.loop.named_cards import GROUP_SIZE, Stopwatch, make_controller

VOCABULARY, PROMPT_TOKENS = 8, 128


def on_reference(measure: Callable[[], float], rounds: int) -> float:
    """Return the least of several measured CPU times, in those of the reference machine."""
    return min(measure() / max(1.0, Speed.measure().slowness) for _ in range(rounds))


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    return timed(work, time.process_time)


# ---- controller


def controller(args: Namespace) -> Figures:
    """Measure the controller at staleness 0 and 1."""
    figures: Figures = {}
    for staleness, groups in product((0, 1), args.groups):
        calls: list[float] = []
        measure = partial(controller_us, groups, staleness, args.min_groups, calls)
        us = on_reference(measure, max(1, args.rounds - (groups >= 16384)))
        figures[f"staleness {staleness}, {groups}"] = {"us_a_group": us, "queue_calls": calls[-1]}
        progress(f"staleness {staleness}, {groups} groups", {"us_a_group": us})
    return figures


def controller_us(groups: int, staleness: int, min_groups: int, queue_calls: list[float]) -> float:
    """Return CPU microseconds of the controller per group, and append the calls of the queue in a step: the mean of the
    steps that train ``min_groups`` groups, at least two, after a first one."""
    watch = Stopwatch()
    with temporary_folder() as folder:
        controller: Any = make_controller(groups, staleness, folder, uncounted=watch.paused)
        controller.train_step()
        steps = max(2, min_groups // groups)
        with collecting_seldom((staleness + 1) * groups * GROUP_SIZE):
            start_s, calls = watch.read_s(), controller.queue.calls
            for _ in range(steps):
                controller.train_step()
            cpu_s = watch.read_s() - start_s
        queue_calls.append((controller.queue.calls - calls) / steps)
        assert controller.admission.ledger.ended["trained"] == groups * (1 + steps), "all groups were trained"
        controller.folder.close()
    return cpu_s / steps / groups * 1e6


# ---- queue


def queue(args: Namespace) -> Figures:
    """Measure a queue that holds many samples, each size in a process of its own."""
    figures: Figures = {}
    for held in args.held:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            figures[f"{held:,} held"] = pool.apply(measure_queue, (held, args.batch))
        progress(f"{held:,} held", figures[f"{held:,} held"])
    return figures


def measure_queue(held: int, size: int, rounds: int = 20) -> Figures:
    """Return samples per second of puts, gets and acks of further samples while ``held`` are in the queue, and the
    bytes of memory per sample."""
    tokens = [torch.arange(8, dtype=torch.int32)] * size

    def batch(start: int, count: int) -> PackedBatch:
        ids = [f"e0-{start + k}/0" for k in range(count)]
        return PackedBatch.from_samples(ids, {"response": tokens[:count]}, ids, [(0, 0)] * count)

    queue = LocalQueue(["reward", "train"])
    queue.put(batch(0, 1))
    gc.collect()
    before = resident_bytes()
    for start in range(1, held, size):
        queue.put(batch(start, min(size, held - start)))
    gc.collect()
    bytes_held = (resident_bytes() - before) / held
    seconds, taken = dict.fromkeys(("put", "get", "ack"), 0.0), list[PackedBatch]()
    for number in range(rounds):
        seconds["put"] += cpu_s(partial(queue.put, batch(held + number * size, size)))
        for task in ("reward", "train"):
            seconds["get"] += cpu_s(lambda: taken.append(queue.get(task, ["response"], size, partial=True)))  # noqa: B023
            seconds["ack"] += cpu_s(partial(queue.ack, task, taken.pop().ids))
    times = {"put": 1, "get": 2, "ack": 2}
    rates = {f"{name}_samples_per_s": times[name] * rounds * size / total for name, total in seconds.items()}
    return rates | {"bytes_per_sample": bytes_held}


# ---- decode


class NoModel:
    """In place of the model that a step calls; the engine knows the real one's config."""

    can_hold_whole_rows = False
    """Whether small passes keep all rows on every rank: this is the only one"""

    def __init__(self, model: Transformer) -> None:
        self.config, self.weights, self._device = model.config, model.weights, model.device.torch_device
        self.head, self._logits = self, torch.zeros(1, VOCABULARY, device=self._device)

    def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(len(ids), 0, device=self._device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden), VOCABULARY)


def decode(args: Namespace) -> Figures:
    """Measure decode steps, and fit a line: the median of all pairs' slopes (Theil and Sen)."""
    torch.set_num_threads(1)
    engine = make_engine(args.sequences[-1])
    us = {n: on_reference(partial(decode_us, engine, n, args.decode_steps), args.rounds) for n in args.sequences}
    points = sorted(us.items())
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 >= 64]
    slope = median(slopes)
    line = {"intercept_us": median(y - slope * x for x, y in points), "us_a_sequence": slope, "us_at_64": us[64]}
    return {"us": {str(n): value for n, value in us.items()}} | line


def make_engine(max_seqs: int) -> EmbeddedEngine:
    """Create an engine that decodes ``max_seqs`` sequences at a time."""
    device: Any = PlainCpu()
    shape = ModelConfig.from_hf({"model_type": "qwen3_moe", **SHAPES["qwen3_moe"], "num_hidden_layers": 1})
    model, limits = Transformer(shape, Mesh.single(), device), dict(max_length=1024, max_batch_tokens=1 << 18)
    engine = engine_of(model, max_seqs=max_seqs, block_size=16, kv_fraction=0.9, **limits)
    model_of_a_step: Any = NoModel(model)
    engine.forward.model = engine.forward.draw.model = model_of_a_step
    return engine


def decode_us(engine: EmbeddedEngine, sequences: int, steps: int) -> float:
    """Return the median CPU microseconds of a step that decodes ``sequences`` sequences of 128 to 256 tokens."""
    params = SamplingParams(max_tokens=512, stop_token_ids=())
    prompts = torch.randint(2, VOCABULARY, (sequences, PROMPT_TOKENS)).tolist()
    engine.submit([Request(f"{k}", tuple(prompt), params) for k, prompt in enumerate(prompts)])
    while engine.last_step_kind != "decode":
        engine.step()
    microseconds = [timed(engine.step, time.thread_time) * 1e6 for _ in range(steps)]
    assert engine.scheduler.running and len(engine.scheduler.running) == sequences
    engine.abort()
    engine.run()
    return median(microseconds)
