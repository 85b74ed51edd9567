"""Hold the actor's weights on a card: in the training layout, in the engine's layout, or alternately in both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fusion.colocate.meshes import Meshes
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.masters import MasterRun, host_parts, master_runs
from fusion.colocate.weights.route import Route, ends_of_route, moves_adapters_alone, plan_route
from fusion.ep_switch import Plan, SwitchReport, weights_checksum
from fusion.ep_switch.exchange import Kind
from fusion.ep_switch.fill import HostParts
from fusion.ep_switch.host_plan import plan_for_host
from fusion.ep_switch.transfer import Switcher
from fusion.model import WeightHolder, load_weights
from fusion.model.peft import begin_adapters, load_adapter
from fusion.model.weights import Buckets
from fusion.npu import Device
from fusion.npu.all_or_none import all_or_none, gather_json


class WeightsDiffer(RuntimeError):
    """Trainer and engine do not hold the same weights after a switch."""


class PolicyWeights:
    """The policy as up to two models over the same weights: ``train`` on cards that train, ``infer`` on cards that
    generate, else None. Slices that are equal in both layouts are stored once.

    Collective over the deployment's actor cards: `to_infer`; over those that train: `to_train`.

    Invariant: outside a switch a card that trains and generates holds one of its two models in memory, or neither."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        rank: int,
        device: Device,
        meshes: Meshes,
        train_model: Callable[..., WeightHolder],
        infer_model: Callable[..., WeightHolder],
    ):
        self.spec, self.device, self.rank, self.meshes = spec, device, rank, meshes
        self.config = config = spec.policy()
        dtype, bucket_bytes = spec.model.torch_dtype, spec.fusion.bucket_bytes
        self.train: WeightHolder | None = None
        self.infer: WeightHolder | None = None
        self.loaded: dict[str, int] = {}
        """Checksums of what this card has loaded, by file (`load_weights`)"""
        if meshes.train is not None:
            self.train = train_model(config, meshes.train, device, dtype, bucket_bytes=bucket_bytes)
            self.loaded = load_weights(self.train, spec.model.path)
            if config.adapters and spec.model.adapter:
                load_adapter(self.train, spec.model.adapter)
            elif config.adapters:
                begin_adapters(self.train, spec.seed)
        if meshes.engine is not None:
            self.infer = infer_model(
                config.without_predictors,
                meshes.engine,
                device,
                dtype,
                bucket_bytes=bucket_bytes,
                batch_invariant=spec.rollout.engine.batch_invariant,
                share=self.train.weights if self.train is not None else None,
                resident=False,
            )
        self._base_stays = moves_adapters_alone(spec, config.without_predictors)
        """Whether only adapters move, as cards that only generate load the base"""
        self._is_base_checked = False
        if self._base_stays and self.train is None and self.infer is not None:
            weights = self.infer.weights
            weights.allocate([index for index, plan in enumerate(weights.plans) if plan.frozen])
            load_weights(self.infer, spec.model.path)
        self._all_or_none = partial(all_or_none, rank=rank, device=device)
        self._routes: dict[tuple[int, ...], Route] = {}
        self._switchers: dict[tuple[Plan, Any, Kind], Switcher] = {}
        self._runs: dict[Plan, dict[int, tuple[MasterRun, ...]]] = {}

    def renew_groups(self) -> None:
        """Drop what was connected or planned over the groups of `meshes` that have been renewed."""
        for of_plan in (self._routes, self._switchers, self._runs):
            of_plan.clear()
        self._is_base_checked = False

    def route(self, engines: Sequence[int]) -> Route:
        """Return the route to these engines, planned once. Collective over the deployment's actor cards."""
        engines = tuple(engines)
        if engines not in self._routes:
            ends = ends_of_route(self.spec, self.config.without_predictors, engines)
            plans = plan_for_host(lambda: plan_route(self.spec, ends), ends, rank=self.rank, group=self.meshes.actor)
            self._routes[engines] = Route(*plans)
        return self._routes[engines]

    def to_infer(self, route: Route, while_generating: bool = False) -> SwitchReport:
        """Move the weights to the engines of the route. A card that only generates releases its old weights first.
        ``while_generating``: cards that only generate keep decoding and receive into their `StagedWeights`."""
        self.check_base()
        if self.train is None and self.infer is not None:
            self.moved(self.infer).release()
        report, _ = self.reshard(
            route.to_infer,
            source=self.train,
            target=self.infer,
            group=self.meshes.actor,
            while_generating=while_generating,
        )
        return report

    def moved(self, model: WeightHolder) -> Buckets:
        """Return the weights of a model that switches move."""
        return model.weights.trained() if self._base_stays else model.weights

    def check_base(self) -> None:
        """Compare the base of all cards, once for every set of cards, where it stays on them. Collective over the
        deployment's actor cards.
        Raise WeightsDiffer: on all cards, with the checksums by rank."""
        if self._base_stays and not self._is_base_checked:
            model, group = self.train or self.infer, self.meshes.actor
            self._same_on_all({"base": self._checksum(model, group, base_only=True)}, group)
            self._is_base_checked = True

    def to_train(
        self, route: Route, masters: Callable[[Iterable[int]], Mapping[int, torch.Tensor]]
    ) -> SwitchReport | None:
        """Move the weights back to the trainer; return None if the trainer has kept them.
        ``masters``: maps shards of the optimizer to their masters on the host, flat float32; called with the shards
        that the plan reads from the host."""
        plan = route.to_train
        if plan is None:
            return None
        group = self.meshes.trainers
        parts = self._all_or_none(lambda: self._hosted(plan, masters), group=group, stage="masters")
        report, _ = self.reshard(plan, source=self.infer, target=self.train, group=group, host=parts)
        return report

    def _hosted(self, plan: Plan, masters: Callable[[Iterable[int]], Mapping[int, torch.Tensor]]) -> HostParts:
        if plan not in self._runs:
            hosted = plan.hosted_units(self.rank)
            runs_by_unit = master_runs(plan.target, self.rank) if hosted else {}
            self._runs[plan] = {unit: runs_by_unit[unit] for unit in hosted}
        runs = self._runs[plan]
        return host_parts(runs, masters({run.shard for unit in runs.values() for run in unit}))

    def reshard(
        self,
        plan: Plan,
        *,
        source: WeightHolder | None,
        target: WeightHolder | Buckets | None,
        group: dist.ProcessGroup | None,
        host: HostParts = MappingProxyType({}),
        while_generating: bool = False,
    ) -> tuple[SwitchReport, int | None]:
        """Run one switch by a plan.
        Return the report, and with `fusion.checksum` the checksum of the policy, else None. It is compared over all
        layouts and engines. A target without a model is checked after a model has adopted it.
        Raise WeightsDiffer: on all cards of the group, with the checksums by rank."""
        source = source if self.rank in plan.source.ranks else None
        target = target if self.rank in plan.target.ranks else None
        # Ranks to which weights are relayed cannot read them in place from another rank's host memory.
        exchange: Kind = (
            "collective" if while_generating and plan.relays and not self.spec.fusion.double_buffer else "auto"
        )
        if (plan, target, exchange) not in self._switchers:
            self._switchers[plan, target, exchange] = Switcher(
                plan, source, target, device=self.device, group=group, exchange=exchange
            )
        switcher, checks = self._switchers[plan, target, exchange], self.spec.fusion.checksum
        before = self._checksum(source, group) if checks else None
        report = switcher.run(checks, host)
        if not checks:
            return report, None
        after = self._checksum(None if isinstance(target, Buckets) else target, group)
        return report, self._same_on_all({"before": before, "after": after}, group)

    def _checksum(
        self, model: WeightHolder | None, group: dist.ProcessGroup | None, base_only: bool = False
    ) -> int | None:
        return self._all_or_none(
            lambda: weights_checksum(model, base_only) if model is not None else None, group=group, stage="checksum"
        )

    def _same_on_all(self, sums_here: dict[str, int | None], group: dist.ProcessGroup | None) -> int:
        sums_by_rank = gather_json(sums_here, group)
        sums = {value for of_rank in sums_by_rank for value in of_rank.values() if value is not None}
        if len(sums) > 1:
            cards = dict(zip(self.spec.deployment.actor, sums_by_rank, strict=False))
            raise WeightsDiffer(f"the checksums of the weights differ, by rank: {cards}")
        return sums.pop()
