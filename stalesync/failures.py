"""Reports the root cause of a failed stage, not its consequences.

A worker sends the exception of a stage as a typed `StageFailed` (`fusion.colocate.failures`); Ray reports workers that
died. Of several failures the root cause is chosen by kind, then by rank, never by the text of a message.
"""

from __future__ import annotations

from collections.abc import Iterable

import ray

from fusion.colocate.failures import StageFailed
from fusion.npu.failures import FailureKind, RankFailure, kind_of

CONSEQUENCES = (FailureKind.PEER_FAILED, FailureKind.PEER_LOST)


class RunFailed(RuntimeError):
    """Raised when the run ends by a failure; the message names what failed, and in which stage."""


class RayNotStarted(RunFailed):
    """Ray could not be started on this machine, or the cluster at ``address`` could not be joined."""

    def __init__(self, address: str | None, error: Exception):
        cause = f"{type(error).__name__}: {error}"
        if address is None:
            advice = (
                "Ray did not start on this machine. If the machine is busy, run again later, or give Ray more time: "
                "RAY_raylet_start_wait_time_s=300 RAY_gcs_server_port_wait_time_s=300. If shared memory (/dev/shm) or "
                "the disk of /tmp is full, free some space"
            )
        else:
            advice = (
                f"cluster.address={address}: could not join this Ray cluster. Is it running (ray status)? Start it "
                "with `ray start --head`, or set cluster.address=null to start Ray on this machine"
            )
        super().__init__(f"{advice}. Ray reports {cause}")


class CardFailed(RunFailed):
    """A worker raised, died or did not answer; the message names its rank and the stage."""


class QueueFailed(RunFailed):
    """The sample queue has ended during the run."""

    def __init__(self, reason: object):
        super().__init__(f"the queue has failed: {reason}; with queue.durability=journal it survives the crash")


class FailedStage:
    """One rank's failure of a stage as received by the controller: the typed failure, and its trace if there is one."""

    def __init__(self, failure: RankFailure, trace: str = ""):
        self.failure, self.trace = failure, trace

    @classmethod
    def of(cls, error: Exception, *, rank: int, stage: str) -> FailedStage:
        """Converts the exception that Ray raises for a stage of a worker."""
        if isinstance(error, ray.exceptions.RayActorError):
            return cls(_failure(error, rank=rank, stage=stage, kind=FailureKind.DIED))
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, StageFailed):
            return cls(cause.failure, cause.trace)
        return cls(_failure(cause, rank=rank, stage=stage, kind=kind_of(cause)), str(error).strip())

    def error(self) -> RunFailed:
        """Returns the error with which the run ends if this is its root cause."""
        failure = self.failure
        if failure.kind is FailureKind.DIED:
            reason = "killed, out of host memory, or crashed"
            return CardFailed(f"rank {failure.rank} died in stage {failure.stage!r} ({reason})")
        if failure.kind is FailureKind.QUEUE_CLOSED:
            return QueueFailed(f"{failure.message} (on rank {failure.rank} in stage {failure.stage!r})")
        detail = f"rank {failure.rank} failed in stage {failure.stage!r}: {failure.error}: {failure.message}"
        return CardFailed(f"{detail}\n{self.trace}")


def root_cause(failed: Iterable[FailedStage]) -> FailedStage:
    """Chooses a died worker before a failure, and either before a consequence of another rank's failure; of equal kinds
    the lowest rank."""
    return min(failed, key=lambda one: (_severity(one.failure.kind), one.failure.rank))


def _failure(error: BaseException, *, rank: int, stage: str, kind: FailureKind) -> RankFailure:
    return RankFailure(rank=rank, stage=stage, kind=kind, error=type(error).__name__, message=str(error))


def _severity(kind: FailureKind) -> int:
    return 0 if kind is FailureKind.DIED else 2 if kind in CONSEQUENCES else 1
