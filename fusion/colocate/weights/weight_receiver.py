"""Receive new weights on a thread of a card that only generates, while the engine's thread decodes.

The thread uses the process group of the actor's cards, which the engine's thread does not use, and calls
`InferEngine.adopt` on the engine's leader."""

import threading
from collections.abc import Callable
from dataclasses import replace

from fusion.colocate.meshes import Meshes
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageReport
from fusion.colocate.weights.staged_weights import StagedWeights
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.inference import InferEngine
from fusion.npu import Device
from fusion.offload import HostPool
from fusion.telemetry import Metrics, Timeline


class WeightReceiver:
    """Receive new weights into staging, have the engine adopt them between two of its steps, and report both. Set the
    engine's `on_adopt`.
    ``make_switcher``: creates the `PhaseSwitcher` that runs this card's side of a switch on the weights thread.
    ``interim_report``: reports the `generate` stage so far; called on its thread."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        rank: int,
        device: Device,
        staged: StagedWeights,
        meshes: Meshes,
        engine: InferEngine,
        make_switcher: Callable[..., PhaseSwitcher],
        interim_report: Callable[[], StageReport],
    ):
        phases = PhaseMachine(rank, spec.deployment.roles_of(rank))
        phases.arrive(Phase.INFER)
        self.staged = staged
        self._device, self._engine, self._stream = device, engine, device.new_stream()
        self._metrics, self._timeline = Metrics(), Timeline(f"card {rank}")
        self.switcher = make_switcher(
            spec=spec,
            rank=rank,
            device=device,
            phases=phases,
            weights=staged,
            meshes=meshes,
            trainer=None,
            engine=None,
            staged=None,
            pool=HostPool(device),
            metrics=self._metrics,
            timeline=Timeline("discarded: the card is generating", max_spans=0),
        )
        self._interim_report = interim_report
        self._adopted = threading.Event()
        self._report: StageReport | None = None
        """Report of the `generate` stage up to the adoption"""
        self._error: BaseException | None = None
        """Error of the adoption, or of the engine's stage, on the engine's thread; it ends the run"""
        engine.on_adopt = self._adopt

    def receive(self, version: int, share: InferenceShare) -> StageReport:
        """Receive policy ``version`` and return once the engine, which must be generating, has adopted it. Collective
        over the actor's cards: the others `switch` with ``while_generating``.
        Raise WeightsDiffer: here and on the engine's thread: the engine has adopted other weights than were sent. So
        does every other error of the adoption, and one that has ended the engine's stage (`abort`)."""
        with self._timeline.span("receive weights", "switch", lane="weights"), self._device.on_stream(self._stream):
            self._adopted.clear()
            self.staged.expect(version)
            self.switcher.to_infer(version, share, while_generating=True)  # ends when all cards have everything
            if self._error is None:
                if self._engine.is_leader:
                    self._engine.adopt(version)
                self._adopted.wait()
        if self._error is not None:
            raise self._error
        self._metrics.add("timing_s/switch/pause", self.staged.pause_s)
        report = self._report
        assert report is not None
        return replace(
            report, metrics=self._metrics.merge(report.metrics).take(), spans=report.spans + self._timeline.drain()
        )

    def recover(self) -> None:
        """Return from a transfer that has failed because another card has died."""
        self.switcher.phases.arrive(Phase.INFER)

    def abort(self, error: BaseException) -> None:
        """End `receive`, now and later, with the error that has ended the engine's stage, whose adoption it would wait
        for in vain. On the engine's thread."""
        self._error = error
        self._adopted.set()

    def _adopt(self, version: int) -> None:
        """Adopt the staged weights, on the engine's thread. `generate` may last for the whole run, so `receive` also
        returns its report so far."""
        try:
            self.staged.adopt(version)
            self._report = self._interim_report()
        except BaseException as error:
            self._error = error  # `receive` waits on another thread and would never return
            raise
        finally:
            self._adopted.set()
