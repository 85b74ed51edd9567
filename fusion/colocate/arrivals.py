"""The weights thread of a card that only generates: it receives while the engine's thread decodes.

It deals with the other cards of the actor by the actor's process group, which the engine's thread leaves alone
meanwhile, and with the engine by an order to its first card (`Engine.adopt`).
"""

from __future__ import annotations

from collections.abc import Callable

from fusion.colocate.meshes import Meshes
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.shadow import Shadow
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageReport
from fusion.colocate.switching import PhaseSwitcher
from fusion.colocate.weights import PolicyWeights
from fusion.inference import Engine
from fusion.npu import Device
from fusion.offload import HostPool
from fusion.telemetry import MemoryLedger, Metrics, Timeline


class Arrivals:
    """``switcher``: makes the card's part in a switch that goes on beside its engine."""

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        device: Device,
        weights: PolicyWeights,
        meshes: Meshes,
        engine: Engine,
        switcher: Callable[..., PhaseSwitcher],
    ):
        pool, phases = HostPool(device), PhaseMachine(rank, spec.deployment.roles_of(rank))
        phases.arrive(Phase.INFER)
        self.shadow = Shadow(weights, device, pool, spec.fusion.double_buffer)
        self._device, self._engine, self._stream = device, engine, device.new_stream()
        self._metrics, self._timeline = Metrics(), Timeline(f"card {rank}")
        parts = spec, rank, device, phases, self.shadow, meshes, None, None, pool, self._metrics
        self._switcher = switcher(*parts)
        engine.on_adopt = self.shadow.adopt

    def receive(self, version: int, share: InferenceShare) -> StageReport:
        """Takes policy ``version`` in, and returns once the engine, which has to be generating, has adopted it.
        Collective over the actor's cards: the others `switch` beside it."""
        with self._timeline.span("receive weights", "switch", lane="weights"), self._device.on_stream(self._stream):
            self.shadow.expect(version)
            self._switcher.to_infer(version, share, beside=True)  # ends when all cards have everything
            if self._engine.mesh.rank == 0:
                self._engine.adopt(version)
            self.shadow.await_adopted()
        self._metrics.add("timing_s/switch/pause", self.shadow.pause_s)
        return StageReport(self._metrics.take(), self._timeline.drain(), MemoryLedger())
