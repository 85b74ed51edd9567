"""What ends a run, and which of several errors to tell: the one that is no echo of another."""

from __future__ import annotations

import ray


class RunFailed(RuntimeError):
    """The run ends; the message names what has failed, and at what."""


class RayNotStarted(RunFailed):
    """Ray could not be started on this machine, or the cluster at ``address`` could not be joined."""

    def __init__(self, address: str | None, error: Exception):
        cause = f"{type(error).__name__}: {error}"
        if address is None:
            advice = (
                "Ray did not start on this machine. Is it busy with other work? Then run again when that has ended, or "
                "give Ray more seconds: RAY_raylet_start_wait_time_s=300 RAY_gcs_server_port_wait_time_s=300. Is "
                "shared memory (/dev/shm) or the disk of /tmp full? Then free some"
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
    """The queue has ended under the run."""

    def __init__(self, told: object):
        super().__init__(f"the queue has failed: {told}; with queue.durability=journal it goes on if it is killed")


def consequence(rank: int, error: Exception) -> int:
    """How likely an error is the echo of another card's: 0 a death, 1 one of its own, 2 a broken connection or a
    failure that a card was told of by another."""
    if isinstance(error, ray.exceptions.RayActorError):
        return 0
    told = getattr(getattr(error, "cause", None), "failures", None)
    if told is not None and rank not in [failure.rank for failure in told]:
        return 2
    text = str(error)
    return 2 if "gloo" in text or "onnection" in text or "DistNetworkError" in text else 1


def say(rank: int, stage: str, error: Exception) -> str:
    """What a card's error is to its user, with the trace where there is one."""
    if isinstance(error, ray.exceptions.RayActorError):
        return f"rank {rank} died in stage {stage!r} (killed, out of host memory, or crashed)"
    detail = str(error.cause) if isinstance(error, ray.exceptions.RayTaskError) else str(error)
    trace = str(error).strip()
    return f"rank {rank} failed in stage {stage!r}: {detail}\n{trace}"
