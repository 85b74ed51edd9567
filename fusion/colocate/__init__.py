"""Trainer and engine on one card.

    spec      WorkerSpec: what every card is told
    phases    the phase machine: allowed transitions, what each phase serves
    weights   the policy in its two layouts, the reference on the host
    samples   columns of the queue ↔ engine outputs and trainer batches
    worker    Worker: one card; its stages are switch, generate, reference, train, save

A worker knows nothing of Ray: `stalesync` starts it as an actor, a test calls it in its own process.
"""

from fusion.colocate.phases import Phase, PhaseError, PhaseMachine
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.worker import StageReport, Worker

__all__ = ["Phase", "PhaseError", "PhaseMachine", "StageReport", "Worker", "WorkerSpec"]
