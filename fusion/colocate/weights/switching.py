"""Switch a card's phase: release, move and allocate memory in order, synchronised with the other cards.

    to INFER   release gradients ─ start offloading the optimizer ─ reshard weights ─ wait for the offload ─ allocate KV
               (if there is not enough memory to reshard, it waits for the offload first; accumulated gradients that no
               step has used are offloaded and loaded with the optimizer)
    to TRAIN   release KV ─ reshard weights ─ start loading the optimizer; the optimizer step waits for it

With float32 masters on the host, the switch to TRAIN rounds some of the weights from them (`masters`). A card that only
generates releases KV and old weights, receives the new weights and allocates KV; one that only trains sends its weights
and keeps them. Every part ends on all cards before the next begins on any, and is aborted on all if it fails on one:
the card is then BROKEN (`PhaseMachine.begin`), so that a partly switched model is never used.

Copies to and from the host overlap with the other parts: `timing_s/switch/offload` and `…/onload` count the time that
the host, or training, waited for them. On the timeline a part is this card's own work; time spent waiting for other
cards is `wait_weights`."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusion.colocate.meshes import Meshes
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.policy import PolicyWeights
from fusion.colocate.weights.route import Route
from fusion.colocate.weights.staged_weights import StagedWeights
from fusion.ep_switch import SwitchReport
from fusion.inference import InferEngine
from fusion.npu import Device
from fusion.npu.all_or_none import all_or_none
from fusion.offload import HostPool, Offloader
from fusion.telemetry import WAIT_WEIGHTS, Metrics, Timeline
from fusion.telemetry.memory import MIB
from fusion.training import TrainEngine

T = TypeVar("T")


class PhaseSwitcher:
    """Switch one card's trainer and engine, either of which may be None. Collective over the deployment's actor
    cards: `to_infer`; over those that train: `to_train`.
    ``weights``: of the policy; `StagedWeights` on the thread that receives them while the engine decodes.
    ``staged``: of a card that receives weights while it decodes; allocated before the KV cache.
    ``pool``: host memory for what is offloaded."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        rank: int,
        device: Device,
        phases: PhaseMachine,
        weights: PolicyWeights | StagedWeights,
        meshes: Meshes,
        trainer: TrainEngine | None,
        engine: InferEngine | None,
        staged: StagedWeights | None,
        pool: HostPool,
        metrics: Metrics,
        timeline: Timeline,
    ):
        self.spec, self.rank, self.phases, self.weights, self.meshes = spec, rank, phases, weights, meshes
        self.device, self.trainer, self.engine, self.metrics = device, trainer, engine, metrics
        self._all_or_none = partial(all_or_none, rank=rank, device=device)
        self.timeline = timeline
        self.offloader = Offloader(device, pool, spec.fusion.bucket_bytes)
        self.staged = staged
        self.route: Route | None = None
        """Route of the current INFER phase, or of the last one"""
        offloads = engine is not None and spec.fusion.offload == "switch"
        self.optimizer = trainer.optimizer_states() if trainer is not None and offloads else {}
        """Optimizer states that are offloaded while the card generates"""

    def to_infer(self, version: int, share: InferenceShare, while_generating: bool = False) -> None:
        """Move the trainer's weights, policy ``version``, to the engines of ``share`` and allocate their KV caches.
        ``while_generating``: engines on cards that only generate keep decoding: these cards participate with a switcher
        over their `StagedWeights` and without an engine.
        Raise AbortedOnAllRanks: on all cards, if a part failed on any (SwitchError: the resharding). If the phase of
        one does not allow the transition, all keep their phase."""
        actor = self.meshes.actor
        target = self._part(actor, "phase", lambda: self._plan(share))
        self.phases.begin(target)
        self._part(actor, "offload", self._clear_for_infer)
        engine = self.engine if target is Phase.INFER else None
        self._part(actor, "settings", lambda: self._configure(engine, version, share))
        with self._timed("reshard"):
            self._add_metrics(self.weights.to_infer(self._planned, while_generating))
        self._part(actor, "offload", self.offloader.wait)
        self._part(actor, "kv", lambda: self._allocate_kv(engine))
        self.phases.arrive(target)

    def to_train(self) -> None:
        """Move the weights back to the trainer. Raise AbortedOnAllRanks: as `to_infer`."""
        self._part(self.meshes.trainers, "phase", lambda: self.phases.check(Phase.TRAIN))
        self.phases.begin(Phase.TRAIN)
        self._part(self.meshes.trainers, "kv", self._release_kv)
        with self._timed("reshard"):
            self._add_metrics(self.weights.to_train(self._planned, self._masters))
        self.phases.arrive(Phase.TRAIN)

    def load_optimizer(self) -> None:
        """Start loading offloaded gradients and then the optimizer; work queued after this call may add to the
        gradients. Collective over the cards that train.
        Raise AbortedOnAllRanks: on all cards, if one lacks memory; there the state stays on the host, and the call can
        be repeated."""
        self._all_or_none(self._load, group=self.meshes.trainers, stage="optimizer")

    def await_optimizer(self) -> None:
        """Wait for the optimizer's state; work queued after this call can use it."""
        stream = self.device.current_stream()
        stream.synchronize()
        with self._timed("onload"):
            self.offloader.wait()
            stream.synchronize()

    def unload_optimizer(self) -> None:
        """Start offloading the optimizer in the background; `to_infer` waits for it."""
        self._send_out(self.optimizer)

    def training_state(self) -> dict[str, Any]:
        """Return the trainer's `state_dict` with every tensor at its current location, on the card or on the host.
        Only for reading, by work that is queued before any other work of the card."""
        assert self.trainer is not None
        self.offloader.wait()
        state = self.trainer.state_dict()
        tensors = state["tensors"]
        on_host = {name: self.offloader.host(name).view(tensors[name].dtype) for name in self._away(tensors)}
        return state | {"tensors": tensors | on_host}

    def _load(self) -> None:
        gradients = self._away(self.trainer.gradients() if self.trainer is not None else {})
        self.offloader.back(gradients)
        self.offloader.wait(gradients)
        self.offloader.back(self._away(self.optimizer))

    def _send_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.offloader.out({name: tensor for name, tensor in tensors.items() if self.offloader.resident(name)})

    def _away(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self.offloader.resident(name)]

    def _plan(self, share: InferenceShare) -> Phase:
        """Set the route; return the phase of this card on it."""
        route = self.weights.route(share.engines)
        target = route.phase_of(self.rank, Phase.INFER)
        self.phases.check(target)
        self.route = route
        return target

    @property
    def _planned(self) -> Route:
        assert self.route is not None, "the first switch is to INFER"
        return self.route

    def _masters(self, shards: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the masters of these shards of the optimizer on the host, flat float32."""
        assert self.trainer is not None
        names = {shard: f"master.{shard}" for shard in shards}
        if self.spec.fusion.offload == "switch":
            return {shard: self.offloader.host(name).view(torch.float32) for shard, name in names.items()}
        states = self.trainer.optimizer_states() if names else {}
        return {shard: states[name] for shard, name in names.items()}

    def _clear_for_infer(self) -> None:
        if self.trainer is not None and self.engine is not None:
            if self.trainer.accumulating:
                self._send_out(self.trainer.gradients())
            else:
                self.trainer.release_gradients()
            self.unload_optimizer()
            plan = self._planned.to_infer
            if self.device.memory().free < plan.peak_bytes(self.rank) - plan.source.nbytes(self.rank):
                self.offloader.wait()  # the weights cannot be resharded while the optimizer is still there
        elif self.engine is not None:
            self._release_kv()

    def _configure(self, engine: InferEngine | None, version: int, share: InferenceShare) -> None:
        # A separate part, as a rank that fails here must not leave others waiting in the collective of `allocate_kv`.
        if engine is not None:
            engine.reconfigure(share.rollout(self.spec.rollout))
            engine.policy_version = version

    def _allocate_kv(self, engine: InferEngine | None) -> None:
        if engine is not None:
            if self.staged is not None:
                self.staged.reserve()
            engine.allocate_kv()

    def _release_kv(self) -> None:
        if self.engine is not None:
            self.engine.release_kv()

    def _part(self, group: dist.ProcessGroup | None, name: str, work: Callable[[], T]) -> T:
        with self._clock(name), self.timeline.strip() as mark:

            def own() -> T:
                result = work()
                mark(f"switch/{name}")
                return result

            result = self._all_or_none(own, group=group, stage=name)
            mark(WAIT_WEIGHTS if group is not None else f"switch/{name}")
        return result

    def _add_metrics(self, report: SwitchReport | None) -> None:
        if report is None:
            return
        self.metrics.add("switch/bytes_moved_total", report.bytes_moved, rule="sum")
        self.metrics.add("switch/bytes_hosted_total", report.bytes_hosted, rule="sum")
        self.metrics.add("switch/peak_mib_max", report.peak_bytes / MIB)
        for part, seconds in report.parts_s.items():
            self.metrics.add(f"timing_s/switch/reshard/{part}", seconds)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        with self._clock(part), self.timeline.span(part, f"switch/{part}"):
            yield

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        # Not `Metrics.timer`: synchronising the device would wait for the copies in the background.
        start = time.perf_counter()
        yield
        self.metrics.add(f"timing_s/switch/{part}", time.perf_counter() - start)
