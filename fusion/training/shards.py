"""Which part of a flat bucket a rank's optimizer owns, and how its elements are to be treated: pure arithmetic.

    bucket   | input_norm | qkv                     | q_norm | out        | …
    rank 0   [ no decay   | decay       ]
    rank 1                              [ decay      | none   | decay      ]

Invariants of `shard_runs`: the runs of a shard lie end to end and cover it exactly; every element of a parameter is in
a run of its own treatment; padding goes with the parameter before it; neighbouring runs differ in treatment. Over all
ranks that hold replicas of a bucket the shards cover it once.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.model import BucketPlan


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a bucket. ``replicated``: the other TP ranks hold the same elements."""

    start: int
    stop: int
    decay: bool
    replicated: bool


def shard_range(plan: BucketPlan, replicas: int, replica: int) -> tuple[int, int]:
    """The elements [start, stop) of a bucket whose optimizer state replica ``replica`` owns (ZeRO-1)."""
    assert plan.numel % replicas == 0
    size = plan.numel // replicas
    return replica * size, (replica + 1) * size


def shard_runs(plan: BucketPlan, start: int, stop: int) -> list[Run]:
    """The runs of the shard [start, stop). Matrices decay, vectors (norms) do not."""
    ends = [offset for _, offset in plan.entries[1:]] + [plan.numel]
    runs: list[Run] = []
    for (param, offset), end in zip(plan.entries, ends, strict=True):
        first, last = max(offset, start), min(end, stop)
        if first >= last:
            continue
        run = Run(first, last, len(param.shape) > 1, not (param.expert or param.tp_sharded))
        before = runs[-1] if runs else None
        if before and (before.decay, before.replicated) == (run.decay, run.replicated):
            runs[-1] = Run(before.start, last, run.decay, run.replicated)
        else:
            runs.append(run)
    return runs
