"""Model the published baseline as it was: what synchronous `separate` cards of this project do not pay. Pure.

    simulated step of `separate` ─ + term ─ + term ─► step of the baseline ─► speed of `colocated` over it ─► gap

The published ratio of `colocated` to `separate` has a baseline with a slow update of weights and a padded queue; a
simulation of both deployments here has neither. Each term has its source. Nothing is fitted: what the terms do not
explain is the gap, published ratio over modelled ratio.

Invariant: terms are at least 0, so that the modelled ratio is at least the one without them."""

from dataclasses import dataclass
from itertools import accumulate

PUBLISHED_MODEL, PUBLISHED_RATIO = "pangu_718b", 1.785
"""Speed of synchronous `colocated` over `separate`, on one CloudMatrix 384 supernode"""
BROADCAST_BYTES_PER_S = 1e12 / 53.3
"""Speed of an update of all engines' weights: Kimi K2, 1T parameters in FP8, to 256 H100s by NCCL broadcast, 53.3 s"""
READERS = 128
"""Ranks that each read a sample where no leader reads for its group: TP8 x PP16 of the published training"""
TOKEN_BYTES = 24
"""Bytes of a padded token in the queue, assumed: ids and mask of 8 bytes, log-probabilities and advantages of 4"""


@dataclass(frozen=True)
class BaselineStep:
    """One step on one supernode. ``padded_tokens``: of the longest sample; ``train_s``, ``step_s``: of the simulated
    synchronous `separate`; ``colocated_s``: a step of synchronous `colocated`."""

    weight_bytes: float
    samples: int
    mean_tokens: float
    padded_tokens: float
    link_bytes_per_s: float
    train_s: float
    step_s: float
    colocated_s: float


@dataclass(frozen=True)
class AddedTime:
    """What makes a step of the baseline longer, by ``seconds``."""

    name: str
    seconds: float
    source: str


@dataclass(frozen=True)
class BaselineRow:
    """A term, and the speed of `colocated` over the baseline with it and those before; ``gap``: published over that."""

    term: AddedTime
    ratio: float

    @property
    def gap(self) -> float:
        return PUBLISHED_RATIO / self.ratio


def terms(job: BaselineStep) -> list[AddedTime]:
    """Return the terms, those with a measured source first, what is assumed last."""
    queued = job.samples * job.padded_tokens * TOKEN_BYTES * READERS
    padding = job.padded_tokens / job.mean_tokens - 1
    return [
        AddedTime("as simulated", 0.0, "separate cards of this project, uncalibrated"),
        AddedTime("engines start up", 0.0, "none: engines on cards of their own keep their memory"),
        AddedTime("weights by broadcast", job.weight_bytes / BROADCAST_BYTES_PER_S, "Kimi K2 to 256 H100s: 53.3 s"),
        AddedTime("a padded queue that all ranks read", queued / job.link_bytes_per_s, f"{READERS} readers: published"),
        AddedTime(
            "training on padded samples", job.train_s * padding, "assumed: the baseline pads, colocated does not"
        ),
    ]


def rows(job: BaselineStep) -> list[BaselineRow]:
    """Return the terms one after another, each with the ratio so far."""
    all_terms = terms(job)
    steps_s = accumulate((term.seconds for term in all_terms), initial=job.step_s)
    next(steps_s)
    return [BaselineRow(term, step_s / job.colocated_s) for term, step_s in zip(all_terms, steps_s, strict=True)]
