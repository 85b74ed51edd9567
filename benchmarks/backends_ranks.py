"""Time both training backends of `benchmarks/backends.py` on one rank, in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.backends import LENGTH, SAMPLES, SHAPE, TOKEN_BUDGET, WORLD, summary
from benchmarks.rotation import in_rotation
from benchmarks.switch_clock import check, fill, wall
from fusion.ep_switch import Layout, plan_switch
from fusion.ep_switch.transfer import Switcher
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, global_params
from fusion.npu import Device, open_device
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import make_algorithm
from fusion.training.backends.support import installed_version
from tests.training.sequences import sequences_of

BUCKET_BYTES = 1 << 21
ENGINE = Parallel(WORLD, ep=WORLD)


def rank_main(rank: int, folder: str, layout: Parallel, rounds: int) -> None:
    torch.set_num_threads(1)
    device = open_device("emulated", index=rank, capacity_bytes=4 << 30)
    store = f"file://{folder}/store"
    dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=WORLD)
    config, description = ModelConfig.from_hf(SHAPE), device.describe()
    figures = measure(config, device, layout, rounds)
    if rank == 0:
        parameters = sum(torch.Size(shape).numel() for shape in global_params(config).values())
        result = {
            "device": description,
            "torch": torch.__version__,
            "model": SHAPE,
            "parameters": parameters,
            "layout": str(layout),
            "rounds": rounds,
            "figures": figures,
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure(config: ModelConfig, device: Device, layout: Parallel, rounds: int) -> dict[str, Any]:
    """Return the figures, the same on every rank. Collective."""
    train, engine = Mesh.create(layout), Mesh.create(ENGINE)
    builders: dict[str, Any] = {"embedded": Transformer}
    if installed_version() is not None:
        from fusion.training.backends.megatron_model import MegatronModel

        builders["megatron"] = MegatronModel
    sides = {name: Side(build, config, device, train=train, engine=engine) for name, build in builders.items()}
    floor = Products(sides["embedded"].model, device)
    seconds: dict[str, list[float]] = {"floor": []} | {
        key: [] for name in sides for key in (name, f"{name}_to_engine", f"{name}_to_trainer")
    }
    for round_ in range(-1, rounds):
        measured: dict[str, float] = {}
        for name in in_rotation(["floor", *sides], round_):
            if name == "floor":
                measured["floor"] = wall(device, floor.run)
                continue
            side = sides[name]
            measured[name] = wall(device, side.step)
            measured[f"{name}_to_engine"] = wall(device, side.switches[0].run)
            measured[f"{name}_to_trainer"] = wall(device, side.switches[1].run)
        for key, value in measured.items() if round_ >= 0 else ():
            seconds[key].append(value)
    for side in sides.values():
        side.verify_switch()
    return summary(seconds)


class Side:
    """Trains one backend's model on a rank and switches its weights to an engine and back."""

    def __init__(self, build: Any, config: ModelConfig, device: Device, *, train: Mesh, engine: Mesh):
        self.device = device
        self.model = build(config, train, device, bucket_bytes=BUCKET_BYTES)
        random = torch.Generator().manual_seed(train.rank)
        for flat in self.model.weights.flats:
            flat.copy_(0.02 * torch.randn(flat.shape, generator=random))
        training = TrainingConfig(lr=0.0, weight_decay=0.0, token_budget=TOKEN_BUDGET, load_balancing_coef=0.0)
        self.trainer = EmbeddedTrainEngine(self.model, train, device, training)
        self.algorithm = make_algorithm(AlgorithmConfig(), LENGTH)
        self.batch = self.algorithm.weigh(_batch(config, train))
        self.engine = Transformer(
            config, engine, device, bucket_bytes=BUCKET_BYTES, share=self.model.weights, resident=False
        )
        ranks = tuple(range(WORLD))
        options = dict(config=config, ranks=ranks, bucket_bytes=BUCKET_BYTES)
        ends = (
            Layout(parallel=train.parallel, format=self.model.format, **options),  # type: ignore[arg-type]
            Layout(parallel=ENGINE, **options),  # type: ignore[arg-type]
        )
        models = self.model, self.engine
        self.switches = [
            Switcher(plan_switch(ends[i], ends[1 - i], BUCKET_BYTES), models[i], models[1 - i], device=device)
            for i in (0, 1)
        ]

    def step(self) -> None:
        self.trainer.forward_backward(self.batch, self.algorithm.loss)
        self.trainer.optimizer_step()

    def verify_switch(self) -> None:
        """Compare every element of the weights after a switch there, and after one back."""
        fill(self.model.table, self.model.weights.views)
        self.switches[0].run()
        check(self.engine.table, self.engine.weights.views)
        self.switches[1].run()
        check(self.model.table, self.model.weights.views)


class Products:
    """The matrix products of a step: of every matrix with the rows that a rank multiplies it by, and its gradients."""

    def __init__(self, model: Transformer, device: Device):
        parallel, config = model.mesh.parallel, model.config
        rows = SAMPLES * LENGTH // parallel.dp
        expert_rows = SAMPLES * LENGTH * config.top_k // config.num_experts // parallel.edp
        self.factors = []
        for param in model.table:
            if len(param.shape) == 2 and param.name != "embed":
                count = expert_rows if param.expert else rows
                x = torch.randn(count, param.shape[1]).to(device.torch_device)
                self.factors.append((x, torch.randn(param.shape).to(device.torch_device)))

    def run(self) -> None:
        for x, weight in self.factors:
            y = F.linear(x, weight)
            torch.mm(y, weight)
            torch.mm(y.t(), x)


def _batch(config: ModelConfig, mesh: Mesh) -> Sequences:
    """Return this data-parallel rank's samples: half prompt, half response."""
    random = torch.Generator().manual_seed(mesh.dp_rank)
    count, half = SAMPLES // mesh.parallel.dp, LENGTH // 2

    def tokens() -> list[torch.Tensor]:
        return [torch.randint(1, config.vocab_size, (half,), generator=random) for _ in range(count)]

    return sequences_of(
        tokens(),
        tokens(),
        advantages=torch.randn(count, generator=random),
        behaviour_logprobs=[torch.full((half,), -8.3) for _ in range(count)],
        versions=[torch.zeros(half, dtype=torch.int64) for _ in range(count)],
        trained=[True] * count,
    )
