"""Run the sides of `benchmarks/lora.py`: a model whose adapters are trained, and one that is trained whole."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, in_turns, progress, timed
from benchmarks.switch_sides import moe_of
from fusion.ep_switch import Layout, plan_switch
from fusion.ep_switch.transfer import Switcher
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Buckets, Mesh, ModelConfig, Parallel, Transformer
from fusion.model.adapters import Adapters
from fusion.npu import Device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.config import LoraConfig
from tests.ep_switch.pair import Pair, fill
from tests.helpers import end_ranks, run_ranks
from tests.rollouts import rollout_config
from tests.training.ranks import sample_batch

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 16, 32
SWITCHES_A_ROUND = 8
"""Both ways of a switch take a tenth of a second, a step or decoding some seconds"""


def configs(args: Namespace) -> dict[str, ModelConfig]:
    """Return the model with adapters and without."""
    full = moe_of(args)
    return {"lora": replace(full, adapters=Adapters(args.rank, 2.0 * args.rank)), "full": full}


def measure(args: Namespace) -> Figures:
    """Measure switches, training and decoding, each on cards of its own."""
    models, figures = configs(args), dict[str, Any]()
    for ranks, part in ((4, _switch), (1, _train), (1, _decode)):
        figures |= run_ranks(part, ranks, models, args, timeout_s=3600)[0]
        end_ranks()
        progress(part.__name__.strip("_"), figures)
    return figures


def _switch(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Namespace) -> Figures:
    train, infer, trainers, engines = Parallel(2, tp=2, ep=2), Parallel(2, ep=2), (0, 1), (2, 3)
    options: dict[str, Any] = {"bucket_bytes": 16 << 20, "trained_only": True}
    source, target = (Layout(models["lora"], *where, **options) for where in ((train, trainers), (infer, engines)))
    plan = plan_switch(source, target, 16 << 20, keep=True)
    held = Buckets((source if rank in trainers else target).units(rank), device, torch.float32, owner="weights")
    if rank in trainers:
        fill([param for unit in held.plans for param, _ in unit.entries], held.views)
    else:
        held.release()
    ends = (held, None) if rank in trainers else (None, held)
    received = torch.tensor([Switcher(plan, *ends, device=device).run().bytes_moved])
    dist.all_reduce(received)
    units = [unit for engine in engines for unit in target.units(engine)]
    sent, adapter_bytes = int(received), 4 * sum(param.numel for unit in units for param, _ in unit.entries)

    sides: dict[str, Callable[[int], float]] = {}
    for name, config in models.items():
        pair = Pair(config, device, one=Parallel(4, tp=2, ep=2), other=Parallel(4, ep=4))
        sides[name] = lambda round, pair=pair: sum(pair.switch(end)[0] for end in (0, 1))  # type: ignore[misc]
    turns = in_turns(sides, SWITCHES_A_ROUND * args.rounds)
    seconds = {name: statistics.median(times) for name, times in turns.items()}
    found = {"bytes": sent, "adapter_bytes": adapter_bytes, "sent_over_adapters": sent / adapter_bytes}
    return {"switch": found | _compared(seconds)}


def _train(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Namespace) -> Figures:
    batch = sample_batch(max(2, args.tokens // 9), 3, vocabulary=32 * args.hidden)
    peak, sides = dict[str, int](), dict[str, Callable[[int], float]]()
    for name, config in models.items():
        before = device.memory().allocated
        model = Transformer(config, Mesh.single(), device, bucket_bytes=16 << 20)
        randomise(model)
        lora = LoraConfig(rank=config.adapters.rank if config.adapters else 0)
        settings = TrainingConfig(lora=lora, lr=1e-4, token_budget=args.tokens, load_balancing_coef=0.0)
        engine = EmbeddedTrainEngine(model, model.mesh, device, settings)

        def step(round: int, engine: EmbeddedTrainEngine = engine) -> float:
            def work() -> None:
                engine.forward_backward(batch, cross_entropy)
                engine.optimizer_step()

            return timed(work, device=device)

        step(0)
        device.reset_peak()
        step(0)
        peak[name], sides[name] = device.memory().peak_allocated - before, step
    seconds = {name: statistics.median(times) for name, times in in_turns(sides, args.rounds).items()}
    return {
        "hbm": peak | {"ratio": peak["lora"] / peak["full"]},
        "step": _compared(seconds),
    }


def _decode(rank: int, device: Device, models: Mapping[str, ModelConfig], args: Namespace) -> Figures:
    sides: dict[str, Callable[[int], float]] = {}
    for name, config in models.items():
        model = Transformer(config, Mesh.single(), device, bucket_bytes=16 << 20)
        model.requires_grad_(False)
        randomise(model)
        options = dict(max_length=PROMPT_TOKENS + NEW_TOKENS, max_seqs=SEQUENCES, kv_fraction=0.3)
        engine = EmbeddedEngine(model, model.mesh, device, config=rollout_config(**options))
        engine.allocate_kv()

        def run(round: int, engine: EmbeddedEngine = engine) -> float:
            prompts = torch.randint(2, 100, (SEQUENCES, PROMPT_TOKENS), generator=torch.manual_seed(1)).tolist()
            params, finished = SamplingParams(max_tokens=NEW_TOKENS), 0
            engine.policy_version = round  # no prefix of another round is reused
            engine.submit([Request(f"{round}-{index}", tuple(row), params) for index, row in enumerate(prompts)])

            def generate() -> None:
                nonlocal finished
                while finished < SEQUENCES:
                    finished += len(engine.step())

            return timed(generate, device=device)

        sides[name] = run
    seconds = {name: statistics.median(times) for name, times in in_turns(sides, args.rounds).items()}
    return {"decode": _compared(seconds)}


def _compared(seconds: Mapping[str, float]) -> Figures:
    return {f"{name}_s": value for name, value in seconds.items()} | {"ratio": seconds["lora"] / seconds["full"]}


def randomise(model: Transformer) -> None:
    """Give every weight a value of its usual size: the time of what is all zeros tells nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for flat in model.weights.flats:
            flat.copy_(torch.empty(flat.shape).normal_(std=0.02, generator=generator))
