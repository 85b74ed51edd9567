"""Define the factories of a worker's components. To use another trainer or engine, pass another factory. A worker that
is not paced uses the default ones and does not load the cost model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fusion.colocate.frozen.roles import FrozenRoles
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.inference import EmbeddedEngine, InferEngine
from fusion.model import Transformer, WeightHolder
from fusion.npu.pacer import Pacer
from fusion.training import EmbeddedTrainEngine, TrainEngine


def frozen_transformer(*args: Any, **options: Any) -> Transformer:
    """Create a `Transformer` that is never trained."""
    model = Transformer(*args, **options)
    model.requires_grad_(False)
    return model


@dataclass(frozen=True)
class WorkerParts:
    """Each factory is called with the arguments of its default, by keyword."""

    train_model: Callable[..., WeightHolder] = Transformer
    infer_model: Callable[..., WeightHolder] = frozen_transformer
    trainer: Callable[..., TrainEngine] = EmbeddedTrainEngine
    engine: Callable[..., InferEngine] = EmbeddedEngine
    roles: Callable[..., FrozenRoles] = FrozenRoles
    switcher: Callable[..., PhaseSwitcher] = PhaseSwitcher
    background_switcher: Callable[..., PhaseSwitcher] = PhaseSwitcher
    """The switcher of the thread that receives weights while the engine decodes"""
    pacer: Pacer | None = None
    """The modelled clock that paced parts share"""


def worker_parts(spec: WorkerSpec) -> WorkerParts:
    """Return the factories for a card of this run."""
    parts = WorkerParts()
    if spec.pace is not None:
        from fusion.colocate.paced import paced_parts

        parts = paced_parts(spec)
    if spec.training.backend == "megatron":
        from fusion.training.backends.megatron_model import MegatronModel

        parts = replace(parts, train_model=MegatronModel)
    if spec.rollout.backend == "vllm":
        from fusion.inference.backends.vllm_engine import VllmEngine
        from fusion.inference.backends.vllm_model import VllmModel

        model = partial(VllmModel, rollout=spec.rollout, routing=spec.algorithm.replay == "rollout")
        parts = replace(parts, infer_model=model, engine=VllmEngine)
    return parts
