"""Describe what failed, on which rank and in which stage, as typed plain data that is sent between processes.

    exception of any type ──RankFailure.of──► RankFailure (rank, stage, kind, type name, message, bytes by owner)
                                                  │ JSON, over a process group or sockets (`all_or_none`)
                                                  ▼
                                              AbortedOnAllRanks(failures), on every rank

Kinds are decided by the type of the exception, never by its text. gloo (torch 2.13) raises a plain RuntimeError where
hccl and nccl raise `torch.distributed.DistBackendError`; a RuntimeError counts as a collective's if it was raised
inside torch.distributed, or by `wait_for`."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from fusion.telemetry.memory import MIB

if TYPE_CHECKING:
    import torch.distributed as dist

F = TypeVar("F", bound="RankFailure")

_JSON_TYPES: Mapping[str, type] = {"int": int, "str": str, "FailureKind": str, "dict[str, int]": dict}
"""Type of a failure's field in JSON, by its annotation"""

COLLECTIVES = "torch.distributed.distributed_c10d"
"""The module whose functions run collectives, except those that set groups up (`SETUP`)."""

SETUP = frozenset(("init_process_group", "new_group", "destroy_process_group"))


class FailureKind(str, Enum):
    """Classify why a rank failed; causes are listed before consequences."""

    DIED = "died"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    """The rank itself raised an error."""
    TIMED_OUT = "timed_out"
    """The rank did not answer in time."""
    QUEUE_CLOSED = "queue_closed"
    """The sample queue was closed while the rank used it."""
    PEER_FAILED = "peer_failed"
    """Another rank of its group failed, and all ranks aborted."""
    PEER_LOST = "peer_lost"
    """A collective failed because another rank has ended or left it."""


CONSEQUENCES = (FailureKind.PEER_FAILED, FailureKind.PEER_LOST)
"""Kinds of failures that only follow from that of another rank"""


class CollectiveFailed(RuntimeError):
    """Raised when a collective of this rank fails because another rank has ended or left it."""


def advice(stage: str) -> str:
    """Return which key lowers the memory of a stage, and where to plan it."""
    generates = any(word in stage for word in ("infer", "generate", "answer"))
    key = (
        "rollout.engine.kv_fraction or rollout.engine.max_seqs"
        if generates
        else "training.token_budget (or set training.recompute=true)"
    )
    return f"lower {key}, or use more cards a layout (parallel); scripts/plan.py shows the memory of every phase"


class OutOfMemory(RuntimeError):
    """Raised when a card runs out of memory in a stage; the message lists the memory by owner."""

    def __init__(self, stage: str, failure: RankFailure):
        super().__init__(stage, failure)
        self.stage, self.failure = stage, failure

    @property
    def rank(self) -> int:
        return self.failure.rank

    @property
    def bytes_by_owner(self) -> Mapping[str, int]:
        """HBM by owner (`Device.memory_by_owner`) at the failure, before any was released."""
        return self.failure.bytes_by_owner

    def __str__(self) -> str:
        part = f", {self.failure.where}" if self.failure.where != self.stage else ""
        return (
            f"rank {self.rank} is out of memory in stage {self.stage!r}{part}; "
            f"HBM by owner: {format_owners(self.bytes_by_owner)}; {advice(self.stage)}\n{self.failure.message}"
        )


@dataclass(frozen=True)
class RankFailure:
    """Describe the failure of one rank."""

    rank: int
    stage: str
    """Name of the work that failed."""
    kind: FailureKind
    error: str
    """Name of the exception's type; empty where another rank reports the failure."""
    message: str
    bytes_by_owner: dict[str, int] = field(default_factory=dict)
    """HBM by owner when the card was out of memory; else empty."""

    @classmethod
    def of(
        cls, error: BaseException, *, rank: int, stage: str, bytes_by_owner: Mapping[str, int] | None = None
    ) -> RankFailure:
        """Describe an exception. ``bytes_by_owner`` is recorded only for out-of-memory errors."""
        kind = kind_of(error)
        owners = dict(bytes_by_owner or {}) if kind is FailureKind.OUT_OF_MEMORY else {}
        return cls(
            rank=rank, stage=stage, kind=kind, error=type(error).__name__, message=str(error), bytes_by_owner=owners
        )

    @property
    def where(self) -> str:
        return self.stage

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[F], fields: Mapping[str, Any]) -> F:
        """Invert `to_json`; fields of subclasses are dropped.
        Raise ValueError: a field is missing or of another type."""
        known: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            value = fields.get(entry.name) if isinstance(fields, Mapping) else None
            if not isinstance(value, _JSON_TYPES[str(entry.type)]):
                raise ValueError(f"a failure with {entry.name}={value!r:.80}: expected {entry.type}")
            known[entry.name] = value
        return cls(**{**known, "kind": FailureKind(known["kind"])})

    def __str__(self) -> str:
        owners = f"; HBM by owner: {format_owners(self.bytes_by_owner)}" if self.bytes_by_owner else ""
        reason = f"{self.error}: {self.message}" if self.error else self.message
        return f"rank {self.rank} failed in {self.where}: {reason}{owners}"


class AbortedOnAllRanks(RuntimeError):
    """Raised on every rank of a group when work fails on any; ``failures`` are those of all ranks."""

    subject = ""
    """Prefix of the message: what was aborted, where the failures do not name it."""

    def __init__(self, failures: Sequence[RankFailure]):
        super().__init__(failures)
        self.failures = tuple(failures)

    def failure_of(self, rank: int) -> RankFailure | None:
        return next((failure for failure in self.failures if failure.rank == rank), None)

    def __str__(self) -> str:
        return f"{self.subject}aborted on all cards: " + "; ".join(map(str, self.failures))


def failures_in(
    error: BaseException, *, rank: int, stage: str, bytes_by_owner: Mapping[str, int] | None = None
) -> list[RankFailure]:
    """Describe an exception as this rank's failure, or as those of all ranks if they have already aborted."""
    if isinstance(error, AbortedOnAllRanks):
        return list(error.failures)
    return [RankFailure.of(error, rank=rank, stage=stage, bytes_by_owner=bytes_by_owner)]


def kind_of(error: BaseException) -> FailureKind:
    """Classify an exception by its type, and a plain RuntimeError by where it was raised."""
    import torch  # here: who only reads failures, such as Ray's guard, starts without it
    import torch.distributed as dist

    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, (CollectiveFailed, dist.DistError, ConnectionError)):
        return FailureKind.PEER_LOST
    if type(error) is RuntimeError and _raised_in_collective(error.__traceback__):
        return FailureKind.PEER_LOST
    return FailureKind.FAILED


def wait_for(work: dist.Work) -> None:
    """Wait for an asynchronous collective. Raise CollectiveFailed: another rank has ended or left the collective."""
    import torch

    try:
        work.wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the frames in which an error and its causes were raised, which live as long as the
    error does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def format_owners(bytes_by_owner: Mapping[str, int]) -> str:
    """Format the owners with any memory, in MiB."""
    return ", ".join(f"{owner} {nbytes / MIB:.1f} MiB" for owner, nbytes in bytes_by_owner.items() if nbytes)


def _raised_in_collective(raised_at: TracebackType | None) -> bool:
    module = name = ""
    while raised_at is not None:
        frame = raised_at.tb_frame
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        raised_at = raised_at.tb_next
    return module == COLLECTIVES and name not in SETUP
