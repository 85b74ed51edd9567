"""Plan which ranks send and receive the actor's weights when the phase changes, for the engines that generate. Pure.

    cards that train and generate   training layout ──► inference layout ──► training layout, in place
    cards that only generate        receive, and keep them while others train
    cards that only train           send, and keep theirs

Of a policy with adapters the base moves only where cards that train and generate store it in two layouts.

Invariants: after `to_infer` every engine of the route holds the whole policy in its layout. Where no engine of the
route has training cards, the trainer keeps its weights; otherwise `to_train` rebuilds them from cards that train, and
from masters on their hosts (`masters`), alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion.colocate.phases import Phase
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.masters import choose_hosted
from fusion.ep_switch import Layout, Plan, Topology, plan_switch, shared_units
from fusion.ep_switch.host_plan import Ends
from fusion.model import ModelConfig
from fusion.model.formats import engine_format, train_format
from fusion.npu.operators import operators_of


@dataclass(frozen=True)
class Route:
    """Both switches of a step. ``to_train``: None: the trainer keeps its weights while the engines generate."""

    to_infer: Plan
    to_train: Plan | None = None

    def phase_of(self, rank: int, run_phase: Phase) -> Phase:
        """Return the phase of the card ``rank`` while the run is in ``run_phase``, TRAIN or INFER."""
        trains = rank in self.to_infer.source.ranks
        if run_phase is Phase.TRAIN:
            return Phase.TRAIN if trains else Phase.STANDBY
        if trains and self.to_train is None:
            return Phase.TRAIN
        return Phase.INFER if rank in self.to_infer.target.ranks else Phase.STANDBY


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


def ends_of_route(spec: WorkerSpec, config: ModelConfig, engines: Sequence[int]) -> list[Ends]:
    """Return the layouts of the switch to the engines of these numbers and, if they have training cards, back."""
    generating = tuple(rank for number in engines for rank in spec.engines[number])
    shared = tuple(rank for rank in generating if rank in spec.deployment.train)
    trained_only = moves_adapters_alone(spec, config)

    def ends(ranks: tuple[int, ...]) -> Ends:
        train, infer = layouts_of(spec, config, ranks)
        return replace(train, trained_only=trained_only), replace(infer, trained_only=trained_only)

    return [ends(generating), *([ends(shared)[::-1]] if shared else [])]


def plan_route(spec: WorkerSpec, ends: Sequence[Ends]) -> list[Plan]:
    """Plan the switches of a route between the layouts `ends_of_route`; the same on every host."""
    (there, *back), bucket_bytes = ends, spec.fusion.bucket_bytes
    plans = [plan_switch(*there, bucket_bytes, topology=spec.topology, keep=not back)]
    for infer, train in back:
        topology, both = spec.topology or Topology.single_node(), {rank for ranks in spec.engines for rank in ranks}
        with_masters = [rank for rank in train.ranks if rank in both] if spec.masters_on_host else []
        hosted = choose_hosted(infer, train, with_masters, topology=topology) if with_masters else ()
        plans.append(plan_switch(infer, train, bucket_bytes, topology=topology, hosted=hosted))
    return plans
