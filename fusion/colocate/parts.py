"""The classes a worker is built of. A worker that is not paced has the plain ones, and loads no cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion.colocate.frozen.roles import FrozenRoles
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.inference import EmbeddedEngine
from fusion.npu.pacer import Pacer
from fusion.training import EmbeddedTrainEngine


@dataclass(frozen=True)
class WorkerParts:
    """Constructors of a worker's parts."""

    trainer: Callable[..., EmbeddedTrainEngine] = EmbeddedTrainEngine
    engine: Callable[..., EmbeddedEngine] = EmbeddedEngine
    switcher: Callable[..., PhaseSwitcher] = PhaseSwitcher
    background_switcher: Callable[..., PhaseSwitcher] = PhaseSwitcher
    """The switcher of a thread that receives weights beside an engine"""
    roles: Callable[..., FrozenRoles] = FrozenRoles


def worker_parts(spec: WorkerSpec) -> tuple[WorkerParts, Pacer | None]:
    """Returns the parts of a card of this run and, if it is paced, the modelled clock that they share."""
    if spec.pace is None:
        return WorkerParts(), None
    from fusion.colocate.paced import paced_parts

    return paced_parts(spec)
