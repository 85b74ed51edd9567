"""Compute the figures of a simulated run: speed, utilisation, tail, bound, and where the cards' time went.

    cards' time = ideal work + underfilled batches + switches + training beyond its bound + controller + waiting

Figures of speed leave out the first steps, in which nothing has run ahead yet, and the last ones, in which nothing is
admitted for later steps any more. The shares of the cards' time are of the whole run."""

from dataclasses import asdict, dataclass
from typing import Any

from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.work import Bound, SimulatedWork

LOSSES = {
    "underfilled": "engines decode in batches that are not full, as in the tail, or prefill again",
    "waiting": "cards have no work: they wait for other engines, for the other side, or for samples",
    "switch": "switches, adoption of weights, KV copies",
    "training": "bubbles, uneven replicas, gradients between supernodes, the reference's pass",
    "slow dies": "the other dies of an engine, or all that train, wait for a slow one",
    "controller": "cards wait until the controller has called them all",
}
"""Kind of lost time → what it is"""


@dataclass(frozen=True)
class Outcome:
    """Figures in modelled seconds and tokens. ``steps``: measured ones; ``tokens_per_s``: of trained samples, prompts
    and responses; ``utilisation``: share of the cards' time that is ideal work; ``bound_tokens_per_s``: the
    work-conserving bound; ``lost``: share of the cards' time by kind (`LOSSES`); ``weights_network_gb``:
    sent between supernodes in a step; ``gradients_network_gb``: sent in groups that span supernodes, some of it within
    one; ``max_lag``: largest number of versions between admission and training."""

    dies: int
    steps: int
    tokens_per_s: float
    step_s: float
    tail_s: float
    switch_s: float
    train_s: float
    controller_s: float
    queue_s: float
    utilisation: float
    bound_tokens_per_s: float
    lost: dict[str, float]
    weights_network_gb: float
    gradients_network_gb: float
    preemptions: int
    max_lag: int

    @property
    def limit(self) -> str:
        """Return the kind of the largest loss."""
        return max(self.lost, key=lambda kind: self.lost[kind])

    @property
    def ratio_to_bound(self) -> float:
        return self.tokens_per_s / self.bound_tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"limit": self.limit, "ratio_to_bound": self.ratio_to_bound}


def min_steps(max_staleness: int) -> int:
    """Return the number of steps that a run needs so that one is measured."""
    return 2 + 2 * max_staleness


def outcome_of(run: SimulatedRun) -> Outcome:
    """Compute the figures of a run that has ended."""
    setup, pace, totals = run.setup, run.setup.engine.cost.pace, run.totals()
    ahead = setup.config.stalesync.max_staleness
    measured = run.steps[1 + ahead : len(run.steps) - ahead]
    assert measured, f"expected at least {min_steps(ahead)} steps"
    cards, count, bound = setup.worker.world, len(measured), Bound(setup)
    seconds, tokens = sum(step.seconds for step in measured), sum(step.tokens for step in measured)
    rate = pace.token_scale / pace.time_scale
    bound_s = bound(SimulatedWork.sum(step.work for step in measured)).total / cards

    def mean_s(name: str) -> float:
        return sum(getattr(step, name) for step in measured) / count * pace.time_scale

    return Outcome(
        dies=cards,
        steps=count,
        tokens_per_s=tokens / seconds * rate,
        step_s=mean_s("seconds"),
        tail_s=mean_s("tail_s"),
        switch_s=mean_s("switch_s"),
        train_s=mean_s("train_s"),
        controller_s=mean_s("controller_s"),
        queue_s=run.cards.queue_busy_s / len(run.steps) * pace.time_scale,
        utilisation=bound(totals.done).total / (cards * run.clock.now),
        bound_tokens_per_s=tokens / bound_s * rate,
        lost=_lost(run),
        weights_network_gb=setup.switch.network_bytes / 1e9,
        gradients_network_gb=_gradient_bytes(run) / 1e9,
        preemptions=totals.preemptions,
        max_lag=max((lag for step in run.steps for lag in step.lags), default=0),
    )


def _lost(run: SimulatedRun) -> dict[str, float]:
    totals, cards = run.totals(), run.setup.worker.world
    time_s, ideal = cards * run.clock.now, Bound(run.setup)(totals.done)
    slow_train_s = totals.training_card_s * (1 - 1 / run.cards.training_factor)
    controller_s = sum(step.idle_calls_s for step in run.steps) * cards
    lost_s = {
        "underfilled": totals.generating_card_s - ideal.generation - (totals.slow_card_s - slow_train_s),
        "switch": totals.switching_card_s,
        "training": totals.training_card_s - ideal.training - slow_train_s,
        "slow dies": totals.slow_card_s,
        "controller": controller_s,
    }
    lost_s["waiting"] = time_s - ideal.total - sum(lost_s.values())
    return {kind: lost_s[kind] / time_s for kind in LOSSES}


def _gradient_bytes(run: SimulatedRun) -> float:
    """Return the bytes of gradients and gathered weights that the cards which train send for the optimizer steps of a
    step, where the replicas of a pipeline stage are in several supernodes."""
    trainer, minibatches = run.setup.trainer, run.setup.config.algorithm.minibatches
    supernode = trainer.pace.hardware.topology.ranks_per_supernode
    if trainer.layout.stage_world <= supernode:
        return 0.0
    return trainer.roofline.optimizer_link_bytes * trainer.layout.world * minibatches
