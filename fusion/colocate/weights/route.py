"""Plan which ranks send and receive the actor's weights when the phase changes, for the engines that generate. Pure.

    cards that train and generate   training layout ──► inference layout ──► training layout, in place
    cards that only generate        receive, and keep them while others train
    cards that only train           send, and keep theirs

Of a policy with adapters the base moves only where cards that train and generate store it in two layouts.

Invariants: after `to_infer` every engine of the route holds the whole policy in its layout. Where no engine of the
route has training cards, the trainer keeps its weights; otherwise `to_train` rebuilds them from cards that train, and
from masters on their hosts (`masters`), alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion.colocate.deployment import Deployment
from fusion.colocate.phases import Phase
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.masters import choose_hosted
from fusion.ep_switch import Layout, Plan, Topology, plan_switch, shared_units
from fusion.model import ModelConfig
from fusion.model.formats import engine_format, train_format
from fusion.npu.operators import operators_of


@dataclass(frozen=True)
class Route:
    """Both switches of a step.

    Attributes:
        generating: ranks of the engines that run.
        to_train: None: the trainer keeps its weights while the engines generate.
    """

    deployment: Deployment
    generating: tuple[int, ...]
    to_infer: Plan
    to_train: Plan | None

    def phase_of(self, rank: int, run_phase: Phase) -> Phase:
        """Return the phase of the card ``rank`` while the run is in ``run_phase``, TRAIN or INFER."""
        trains = rank in self.deployment.train
        if run_phase is Phase.TRAIN:
            return Phase.TRAIN if trains else Phase.STANDBY
        if trains and self.to_train is None:
            return Phase.TRAIN
        return Phase.INFER if rank in self.generating else Phase.STANDBY


def layouts_of(spec: WorkerSpec, config: ModelConfig, ranks: tuple[int, ...]) -> tuple[Layout, Layout]:
    """Return the layout of the cards that train, and that of engines on ``ranks``."""
    operators = operators_of(spec.device.kind, spec.device.operators)
    options: dict[str, Any] = dict(dtype=spec.model.torch_dtype, bucket_bytes=spec.fusion.bucket_bytes)
    of_trainer = train_format(spec.training.backend, operators)
    of_engine = engine_format(spec.rollout.backend, spec.device.kind, operators)
    train = Layout(config, spec.train.of_weights, spec.deployment.train, format=of_trainer, **options)
    return train, Layout(config, spec.infer_of_one_engine.of_weights, ranks, format=of_engine, **options)


def moves_adapters_alone(spec: WorkerSpec, config: ModelConfig) -> bool:
    """Return whether a switch leaves the base where it is: cards that only generate have loaded theirs, and every card
    that trains, too, stores it once for both of its layouts."""
    if config.adapters is None:
        return False
    train, infer = layouts_of(spec, config, tuple(rank for ranks in spec.engines for rank in ranks))
    return all(
        index in shared_units(train, infer, rank)
        for rank in {*train.ranks} & {*infer.ranks}
        for index, unit in enumerate(infer.units(rank))
        if unit.frozen
    )


def plan_route(spec: WorkerSpec, config: ModelConfig, engines: Sequence[int]) -> Route:
    """Return the route to the engines of these numbers; the same on every rank."""
    deployment, bucket_bytes = spec.deployment, spec.fusion.bucket_bytes
    generating = tuple(rank for number in engines for rank in spec.engines[number])
    shared = tuple(rank for rank in generating if rank in deployment.train)
    trained_only = moves_adapters_alone(spec, config)

    def inference(ranks: tuple[int, ...]) -> Layout:
        return replace(layouts_of(spec, config, ranks)[1], trained_only=trained_only)

    train = replace(layouts_of(spec, config, generating)[0], trained_only=trained_only)
    to_infer = plan_switch(train, inference(generating), bucket_bytes, topology=spec.topology, keep=not shared)
    to_train = None
    if shared:
        topology, both = spec.topology or Topology.single_node(), {rank for ranks in spec.engines for rank in ranks}
        with_masters = [rank for rank in deployment.train if rank in both] if spec.masters_on_host else []
        hosted = choose_hosted(inference(shared), train, with_masters, topology=topology) if with_masters else ()
        to_train = plan_switch(inference(shared), train, bucket_bytes, topology=topology, hosted=hosted)
    return Route(deployment, generating, to_infer, to_train=to_train)
