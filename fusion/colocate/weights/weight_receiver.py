"""The weights thread of a card that only generates: it receives while the engine's thread decodes.

It deals with the other cards of the actor by the actor's process group, which the engine's thread leaves alone
meanwhile, and with the engine by an order to its first card (`EmbeddedEngine.adopt`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from fusion.colocate.meshes import Meshes
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageReport
from fusion.colocate.weights.policy import PolicyWeights
from fusion.colocate.weights.staged_weights import StagedWeights
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.inference import EmbeddedEngine
from fusion.npu import Device
from fusion.offload import HostPool
from fusion.telemetry import Metrics, Timeline


class WeightReceiver:
    """``switcher``: creates the card's side of a switch that runs in the background of its engine.
    ``interim_report``: reports the running stage so far; called on that stage's thread."""

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        device: Device,
        weights: PolicyWeights,
        meshes: Meshes,
        engine: EmbeddedEngine,
        switcher: Callable[..., PhaseSwitcher],
        interim_report: Callable[[], StageReport],
    ):
        pool, phases = HostPool(device), PhaseMachine(rank, spec.deployment.roles_of(rank))
        phases.arrive(Phase.INFER)
        self.staged = StagedWeights(weights, device, pool, spec.fusion.double_buffer)
        self._device, self._engine, self._stream = device, engine, device.new_stream()
        self._metrics, self._timeline = Metrics(), Timeline(f"card {rank}")
        parts = spec, rank, device, phases, self.staged, meshes, None, None, pool, self._metrics
        self._switcher = switcher(*parts, Timeline("nobody's: the card generates meanwhile"))
        self._interim_report, self._adopted = interim_report, threading.Event()
        engine.on_adopt = self._adopt

    def receive(self, version: int, share: InferenceShare) -> StageReport:
        """Takes policy ``version`` in, and returns once the engine, which has to be generating, has adopted it.
        Collective over the actor's cards: the others `switch` beside it."""
        with self._timeline.span("receive weights", "switch", lane="weights"), self._device.on_stream(self._stream):
            self._adopted.clear()
            self.staged.expect(version)
            self._switcher.to_infer(version, share, while_generating=True)  # ends when all cards have everything
            if self._engine.mesh.rank == 0:
                self._engine.adopt(version)
            self._adopted.wait()
        self._metrics.add("timing_s/switch/pause", self.staged.pause_s)
        told = self._told
        return replace(
            told, metrics=self._metrics.merge(told.metrics).take(), spans=told.spans + self._timeline.drain()
        )

    def _adopt(self, version: int) -> None:
        """On the engine's thread. What the stage has to tell so far goes with `receive`: it may run on for ever."""
        self.staged.adopt(version)
        self._told = self._interim_report()
        self._adopted.set()
