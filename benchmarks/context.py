"""Measure what context parallelism saves of a training card's memory, on emulated NPUs.

peak_bytes, by cp: peak of HBM in forward and backward pass of one micro-batch of whole sequences, from the allocator,
without what is held before (weights, gradients, states) and without recomputation. ratio: that over the one of cp=1.
planned: the cost model's estimate of the ratio. seconds: of the pass, where all cards share the machine's cores.

A dense and a sparse layer of grouped-query attention (fp32), one process and one thread a card.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Figures, Option, progress, timed

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.context:measure"},
    [
        Option("tokens", 8192, smoke=256, help="of the micro-batch"),
        Option("sequences", 2, help="that share them"),
        Option("hidden", 128, smoke=32),
    ],
    {"ratio.2": "<= 0.6", "ratio.4": "<= 0.35"},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

import torch

from benchmarks.models import on_cards, randomise
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.setup import Setup, TrainingLimits, Workload
from fusion.costmodel.shape import Shape
from fusion.model import Mesh, ModelConfig, Parallel, Transformer
from fusion.npu import Device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from tests.helpers import tiny_config
from tests.training.sequences import sequences_of

SIZES = (1, 2, 4)


def measure(args: Namespace) -> Figures:
    """Measure each size of context parallelism on as many cards."""
    width, found = args.hidden, dict[int, Figures]()
    sizes = dict(hidden_size=width, num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8)
    layers = dict(mlp_only_layers=[0], intermediate_size=3 * width, moe_intermediate_size=width)
    config = tiny_config(max_position_embeddings=args.tokens, **sizes, **layers)
    for cp in SIZES:
        ranks = on_cards(_pass, cp, config, args)
        found[cp] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        progress(f"cp={cp}", found[cp])
    planned = {cp: _planned(config, args, cp) for cp in SIZES}
    return {
        "peak_bytes": {str(cp): one["peak_bytes"] for cp, one in found.items()},
        "ratio": {str(cp): found[cp]["peak_bytes"] / found[1]["peak_bytes"] for cp in SIZES[1:]},
        "planned": {str(cp): planned[cp] / planned[1] for cp in SIZES[1:]},
        "seconds": {str(cp): one["seconds"] for cp, one in found.items()},
    }


def _pass(rank: int, device: Device, config: ModelConfig, args: Namespace) -> Figures:
    world = torch.distributed.get_world_size()
    model = randomise(Transformer(config, Mesh.create(Parallel(world, cp=world)), device), std=0.05)
    settings = TrainingConfig(lr=1e-4, token_budget=args.tokens, load_balancing_coef=0.01)
    engine, generator = EmbeddedTrainEngine(model, model.mesh, device, settings), torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (args.sequences, args.tokens // args.sequences), generator=generator)
    batch = sequences_of(list(tokens[:, :16]), list(tokens[:, 16:]))
    engine.forward_backward(batch, cross_entropy)  # what is allocated once
    held = device.memory().allocated
    device.reset_peak()
    seconds = timed(lambda: engine.forward_backward(batch, cross_entropy), device=device)
    return {"peak_bytes": device.memory().peak_allocated - held, "seconds": seconds}


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
