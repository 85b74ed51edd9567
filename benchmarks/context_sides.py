"""Run the sides of `benchmarks/context.py`: the same micro-batch on one card, and shared by two and four."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from benchmarks.harness import Figures, progress, timed
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.setup import Setup, TrainingLimits, Workload
from fusion.costmodel.shape import Shape
from fusion.model import Mesh, ModelConfig, Parallel, Transformer
from fusion.npu import Device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from tests.helpers import TINY, TINY_EXPERTS, end_ranks, run_ranks
from tests.training.sequences import sequences_of

SIZES = (1, 2, 4)


def model_of(args: Namespace) -> ModelConfig:
    width = args.hidden
    sizes = dict(hidden_size=width, num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8)
    experts = TINY_EXPERTS | {"moe_intermediate_size": width}
    kind = {"model_type": "qwen3_moe", "mlp_only_layers": [0], "intermediate_size": 3 * width}
    return ModelConfig.from_hf(TINY | experts | sizes | kind | {"max_position_embeddings": args.tokens})


def measure(args: Namespace) -> Figures:
    """Measure each size of context parallelism on as many cards."""
    config, peak, seconds = model_of(args), dict[int, int](), dict[int, float]()
    for cp in SIZES:
        ranks = run_ranks(_pass, cp, config, Parallel(cp, cp=cp), args, timeout_s=3600)
        peak[cp], seconds[cp] = max(bytes for bytes, _ in ranks), max(taken_s for _, taken_s in ranks)
        end_ranks()
        progress(f"cp={cp}", {"peak_bytes": peak[cp], "seconds": seconds[cp]})
    planned = {cp: _planned(config, args, cp) for cp in SIZES}
    return {
        "peak_bytes": _named(peak),
        "ratio": _named({cp: peak[cp] / peak[1] for cp in SIZES[1:]}),
        "planned": _named({cp: planned[cp] / planned[1] for cp in SIZES[1:]}),
        "seconds": _named(seconds),
    }


def _pass(rank: int, device: Device, config: ModelConfig, layout: Parallel, args: Namespace) -> tuple[int, float]:
    model = Transformer(config, Mesh.create(layout), device)
    generator = torch.Generator().manual_seed(0)
    for flat in model.weights.flats:
        flat.copy_(0.05 * torch.randn(flat.shape, generator=generator))
    settings = TrainingConfig(lr=1e-4, token_budget=args.tokens, load_balancing_coef=0.01)
    engine = EmbeddedTrainEngine(model, model.mesh, device, settings)
    tokens = torch.randint(config.vocab_size, (args.sequences, args.tokens // args.sequences), generator=generator)
    batch = sequences_of(list(tokens[:, :16]), list(tokens[:, 16:]))
    engine.forward_backward(batch, cross_entropy)  # what is allocated once
    held = device.memory().allocated
    device.reset_peak()
    taken_s = timed(lambda: engine.forward_backward(batch, cross_entropy), device=device)
    return device.memory().peak_allocated - held, taken_s


def _planned(config: ModelConfig, args: Namespace, cp: int) -> float:
    longest = args.tokens // args.sequences
    setup = Setup(
        Shape("model", config),
        hardware_named("ascend_910b"),
        train=Parallel(cp, cp=cp),
        infer=Parallel(cp),
        training=TrainingLimits(args.tokens, recompute=False),
        workload=Workload(args.sequences, 16.0, longest - 16.0, longest - 16),
    )
    return estimate_memory(setup).phases["train"]["activations"]


def _named(by_size: dict[Any, Any]) -> Figures:
    return {str(cp): value for cp, value in by_size.items()}
