"""Report the root cause of a failed stage, not its consequences.

A worker sends the exception of a stage as a typed `StageFailed` (`fusion.colocate.failures`); Ray reports workers that
died. Of several failures the root cause is chosen by kind, then by rank, never by the text of a message."""

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from distqueue.errors import JournalFull, PutTooLarge, StorageFull
from fusion.colocate.failures import StageFailed, stage_kind
from fusion.npu.failures import CONSEQUENCES, FailureKind, RankFailure
from stalesync.process.hosts import Host, describe_ranks
from stalesync.process.ray_folder import LOGS, ROOT_VARIABLE

START_HEAD = """ray start --head --system-config='{"worker_niceness": 0}'"""
"""Ray would start workers at niceness 15: on a busy core they get about 3 % of the CPU time."""
log = logging.getLogger(__name__)
MIN_FREE_BYTES = 1 << 20
"""With less than this, a file system is reported as full."""
RAY_END_S, POLL_S = 1.0, 0.05
"""Seconds in which a raylet ends after the processes that it has killed, and interval at which that is polled"""
MAX_CAUSE_CHARS = 300
"""Maximum of an error of Ray in a message; the whole of it is in the run's log."""


class RunFailed(RuntimeError):
    """Raised when the run ends by a failure; the message names what failed, and in which stage. ``failure``: the card's
    failure; None: of no single card; ``trace``: the card's traceback; "": there is none."""

    def __init__(self, message: str = "", *, failure: RankFailure | None = None, trace: str = ""):
        super().__init__(message)
        self.failure, self.trace = failure, trace


class ClusterOpen(RunFailed):
    """The Ray cluster at ``address`` needs no token, or this process has none: who reaches it can run code in it."""

    def __init__(self, address: str):
        super().__init__(
            f"cluster.address={address}: there is no token for this Ray cluster, or it accepts callers without one, so "
            "everyone who reaches its ports could run code in it. Before `ray start`, run `ray get-auth-token "
            "--generate` on one host, copy ~/.ray/auth_token to the others, and export RAY_AUTH_MODE=token on "
            "all. To do without, export RAY_AUTH_MODE=disabled"
        )


class TokenRefused(RunFailed):
    """The Ray cluster at ``address`` was started with another token than this process has, or this one sends none."""

    def __init__(self, address: str):
        super().__init__(
            f"cluster.address={address}: the Ray cluster refuses the token of this process. On every host, before `ray "
            "start` and before a run: export RAY_AUTH_MODE=token, and have the same ~/.ray/auth_token (mode 0600), or "
            "the same RAY_AUTH_TOKEN, as the head had when its Ray started"
        )


class RayNotStarted(RunFailed):
    """Ray could not be started on this machine, or the cluster at ``address`` could not be joined."""

    def __init__(self, address: str | None, error: Exception):
        cause = first_line(f"{type(error).__name__}: {error}")
        if address is None and (full := full_storage()):
            advice = f"Ray did not start on this machine: {full}; free some space, or mount it writable"
        elif address is None:
            advice = (
                "Ray did not start on this machine. If the machine is busy, run again later, or give Ray more time: "
                "RAY_raylet_start_wait_time_s=300 RAY_gcs_server_port_wait_time_s=300. If shared memory (/dev/shm) or "
                "the disk of /tmp is full, free some space"
            )
        else:
            advice = (
                f"cluster.address={address}: could not join this Ray cluster. Is it running (ray status)? Start it "
                f"with `{START_HEAD}`, or set cluster.address=null to start Ray on this machine"
            )
        super().__init__(f"{advice}. Ray reports {cause}")


class RayEnded(RunFailed):
    """A process of the Ray that this run has started has ended. ``status``: its exit status, negative for a signal;
    None: it is not known."""

    def __init__(self, name: str, status: int | None = None):
        reason = "its exit status is unknown"
        if full := full_storage():
            reason = full
        elif status == -signal.SIGXFSZ:
            reason = "it exceeded this process's limit on the size of files: increase ulimit -f"
        elif status is not None and status >= 0:
            reason = (
                f"by itself, with status {status}: it gave up waiting for another process of Ray, as on a busy "
                "machine, could not start, or had SIGTERM; run again later"
            )
        elif status is not None:
            reason = PROCESS_ENDED
        super().__init__(f"Ray's process {name} has ended ({reason}); its logs are in the run's folder, {LOGS}")


class CardFailed(RunFailed):
    """A worker raised, died or did not answer; the message names its rank and the stage."""


class QueueFailed(RunFailed):
    """The sample queue has ended during the run, or could not be created. ``reason``: a text or an exception."""

    def __init__(self, reason: object, *, failure: RankFailure | None = None, trace: str = ""):
        message = f"the queue has failed: {reason}"
        if isinstance(reason, StorageFull) or (failure is not None and failure.error == JournalFull.__name__):
            pass  # it names what is full
        elif full := full_storage():
            message = f"{message} ({full}; free some space)"
        else:
            message = f"{message}; with queue.durability=journal it survives the crash"
        super().__init__(message, failure=failure, trace=trace)


class RewardsFailed(RunFailed):
    """More rewards failed than `reward.max_failed_share` allows; the message shows the first failure."""


class EnvironmentsFailed(RunFailed):
    """The environments of many prompts in a row do not begin, or one begins with too many tokens."""


class GradientsNotFinite(RunFailed):
    """Several updates in a row were skipped, as their gradients were not finite."""

    def __init__(self, skipped: int, step: int):
        super().__init__(
            f"{skipped} updates in a row were skipped up to step {step}, as their gradients were not finite (nan or "
            "inf in actor/grad_norm): the weights are those before them. Look at the rewards (critic/rewards/max) and "
            "the ratios (actor/ratio_mean), and lower training.lr; model.dtype=float32 shows whether bfloat16 is the "
            "cause"
        )


PROCESS_ENDED = "killed, out of host memory, or crashed"
OUT_OF_REACH = "it cannot be reached: its process or its host has ended, or the network between the hosts is cut"
HOST_ENDED = "its host has ended, or cannot be reached"


class FailedStage:
    """One rank's failure of a stage as received by the controller: the typed failure, its trace if there is one, and
    for a rank that died what is known of its end."""

    def __init__(self, failure: RankFailure, trace: str = "", end: str = PROCESS_ENDED):
        self.failure, self.trace, self.end = failure, trace, end

    @classmethod
    def of(cls, error: Exception, *, rank: int, stage: str) -> "FailedStage":
        """Convert the exception that Ray raises for a stage of a worker."""
        import ray  # here: Ray's guard starts without it

        if isinstance(error, ray.exceptions.RayActorError):
            unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
            failure = replace(RankFailure.of(error, rank=rank, stage=stage), kind=FailureKind.DIED)
            return cls(failure, end=OUT_OF_REACH if unavailable else PROCESS_ENDED)
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, StageFailed):
            return cls(cause.failure, cause.trace)
        failure = replace(RankFailure.of(cause, rank=rank, stage=stage), kind=stage_kind(cause, rank))
        return cls(failure, str(error).strip())

    def error(self, hosts: Sequence[Host] = (), lost_hosts: Collection[Host] = (), why: str = "") -> RunFailed:
        """Return the error with which the run ends if this is its root cause. ``hosts``: of every rank; they are named
        if there are several; ``lost_hosts``: those that have left the cluster; ``why``: the run does not go on without
        a card that has died; "": it never does."""
        failure = self.failure
        rank = describe_ranks([failure.rank], hosts)
        if failure.kind is FailureKind.DIED:
            lost = failure.rank < len(hosts) and hosts[failure.rank] in lost_hosts
            reason = HOST_ENDED if lost else self.end
            message = f"{rank} died in stage {failure.stage!r} ({reason})"
            return CardFailed(f"{message}; {why}" if why else message, failure=failure)
        if failure.kind is FailureKind.QUEUE_CLOSED:
            reason = f"{failure.message} (on {rank} in stage {failure.stage!r})"
            return QueueFailed(reason, failure=failure, trace=self.trace)
        detail = f"{rank} failed in stage {failure.stage!r}: {failure.error}: {failure.message}"
        if failure.error == PutTooLarge.__name__:
            return CardFailed(detail, failure=failure, trace=self.trace)  # a setting, which the message names
        return CardFailed(f"{detail}\n{self.trace}", failure=failure, trace=self.trace)


def full_storage() -> str:
    """Return which of the file systems that Ray cannot do without is full, with its free bytes, or mounted read-only;
    "" if none is."""
    disk = os.environ.get(ROOT_VARIABLE) or os.environ.get("TMPDIR") or "/tmp"
    for name, path in (("shared memory", "/dev/shm"), ("the disk", disk)):
        if os.path.isdir(path) and (free := _free_bytes(path)) < MIN_FREE_BYTES:
            return f"{name} is full: {path}: {free:,} bytes are free"
        if os.path.isdir(path) and os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"{name} is mounted read-only: {path}"
    return ""


def _free_bytes(path: str) -> int:
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize


def first_line(text: str) -> str:
    """Return the first line of a text, which may go on with the stack of a C++ program; at most MAX_CAUSE_CHARS."""
    line = " ".join(next(iter(text.strip().splitlines()), "").split())
    return line if len(line) <= MAX_CAUSE_CHARS else line[: MAX_CAUSE_CHARS - 2] + " …"


def is_consequence(failed: FailedStage) -> bool:
    """Whether a failure only follows from that of another rank."""
    return failed.failure.kind in CONSEQUENCES


def late_rank(rank: int, stage: str, message: str) -> RankFailure:
    """Describe a rank that did not end a stage, or answer a control call, in time."""
    return RankFailure(rank=rank, stage=stage, kind=FailureKind.TIMED_OUT, error="", message=message)


def root_cause(failed: Iterable[FailedStage]) -> FailedStage:
    """Choose a died worker before a failure, and either before a consequence of another rank's failure; of equal kinds
    the lowest rank."""
    severity = {FailureKind.DIED: 0} | dict.fromkeys(CONSEQUENCES, 2)
    return min(failed, key=lambda one: (severity.get(one.failure.kind, 1), one.failure.rank))


@contextmanager
def logging_errors(task: str) -> Iterator[None]:
    """Log an error of the block instead of raising it: for what is written after a failure, which it would hide."""
    try:
        yield
    except Exception:
        log.exception("%s failed after another failure", task)


def check_end(health_checks: Sequence[Callable[[], None]], wait_s: float = RAY_END_S) -> None:
    """Poll health checks for ``wait_s``, raising what they do: a raylet that ends kills queue and cards first."""
    deadline = time.monotonic() + wait_s
    while True:
        for check in health_checks:
            check()
        if time.monotonic() >= deadline:
            return
        time.sleep(POLL_S)


@contextmanager
def naming_queue(check_ray: Callable[[], None]) -> Iterator[None]:
    """Raise the end of the queue, or that there is no space for it, as `QueueFailed`, unless it is a consequence of the
    end of Ray: what ``check_ray`` raises."""
    from distqueue import QueueClosed, StorageFull

    try:
        yield
    except (QueueClosed, StorageFull) as error:
        check_end([check_ray], 0.0 if isinstance(error, StorageFull) else RAY_END_S)
        raise QueueFailed(error) from error
