"""Record what a simulated run did, and compute the least time in which all cards together could do it: the
work-conserving bound.

    card-seconds = decode in full batches + every prompt prefilled once + training without bubbles + optimizer steps
    bound        = card-seconds / cards

A step of an engine takes the maximum of some lines, which are linear in contexts and attended pairs, and per token
least in a full batch. So for each line the sum over all tokens is a lower bound of the time of all steps that compute
them, and the largest of these is the bound used here.

Invariant (property-tested): the cards of a run never take less than its bound."""

import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from fusion.costmodel.pace import TrainerCost
from fusion.costmodel.roofline import Line, attention_pairs
from fusion.costmodel.setup import TrainingLimits
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.lengths import SimulatedPrompt
from stalesync.simulator.setup import SimulationSetup

NO_LINE = Line(0.0, 0.0, 0.0, 0.0)
MANY = 1_000_000
"""Tokens of a step, or micro-batches, in which what does not depend on their number no longer counts."""


@dataclass
class SimulatedWork:
    """Sums of tokens. ``decodes``, ``contexts``: decode steps of sequences, with their contexts; ``prefilled``,
    ``prefill_pairs``: of prompts; ``trained``, ``trained_pairs``: rows of samples; ``updates``: optimizer steps."""

    decodes: float = 0.0
    contexts: float = 0.0
    prefilled: int = 0
    prefill_pairs: float = 0.0
    trained: float = 0.0
    trained_pairs: float = 0.0
    updates: int = 0

    @classmethod
    def sum(cls, works: "Iterable[SimulatedWork]") -> "SimulatedWork":
        return cls(*map(sum, zip(*map(astuple, works), strict=True)))

    def generate(
        self,
        prompt_tokens: int,
        sampled_tokens: Iterable[int],
        token_scale: int,
        environment: EnvironmentSpec | None = None,
    ) -> None:
        """Add a group: its prompt is prefilled once, and each observation with the token before it. A prefill samples
        the first of the ``token_scale`` modelled tokens of the token behind it."""
        first = (token_scale - 1) / token_scale
        for sampled in sampled_tokens:
            for begin, end in ((0, sampled),) if environment is None else environment.turns_of(sampled):
                tokens, context = end - begin, prompt_tokens + begin
                self.decodes += tokens - 1 + first
                self.contexts += (tokens - 1) * context + tokens * (tokens - 1) / 2 + first * context
                if begin and environment is not None:
                    prefilled = environment.observation_tokens + 1
                    self.prefilled += prefilled
                    self.prefill_pairs += attention_pairs(prefilled, context - prefilled)
        self.prefilled += prompt_tokens
        self.prefill_pairs += attention_pairs(prompt_tokens)

    def train(self, group: SimulatedPrompt, trainer: TrainerCost) -> None:
        """Add a group whose responses are whole: where they are shared, the rows of its prompt are computed once."""
        lengths = group.sample_tokens
        common = [0, *[group.prompt_tokens] * (len(lengths) - 1)]
        rows, pairs = trainer.sizes(lengths, common, token_budget=sys.maxsize)
        self.trained += rows
        self.trained_pairs += pairs


class CardSeconds(NamedTuple):
    """Least seconds of work, summed over cards."""

    generation: float
    training: float

    @property
    def total(self) -> float:
        return self.generation + self.training


class Bound:
    """Compute the card-seconds of work under a setup."""

    def __init__(self, setup: SimulationSetup) -> None:
        self._setup = setup
        cost, layout = setup.engine.cost, setup.worker.infer_of_one_engine
        self._pace, scale = cost.pace, cost.pace.token_scale
        self._cards_of_rank = layout.tp * layout.pp
        full = cost.full_batch
        # So many tokens take longer than their launches, whose line is then missing.
        many, more = cost.roofline.step_lines(MANY), cost.roofline.step_lines(MANY + 1000)
        self._lines = [
            (
                scale * line.fixed / full,
                scale * scale * (line.per_decoded + line.per_kv),
                scale * max(0.0, above.fixed - below.fixed) / 1000,
                scale * scale * line.per_attended,
            )
            for line, below, above in zip_longest(cost.roofline.step_lines(full), many, more, fillvalue=NO_LINE)
        ]
        """Modelled seconds of a rank for a decode, a token of its context, a prefilled token and an attended pair"""

    def __call__(self, work: SimulatedWork) -> CardSeconds:
        """Return the card-seconds of work, in seconds of the run."""
        rank_s = max(
            work.decodes * decode + work.contexts * context + work.prefilled * token + work.prefill_pairs * pair
            for decode, context, token, pair in self._lines
        )
        trainer = self._setup.trainer
        train_s = 0.0
        if work.trained:
            tokens = MANY * TrainingLimits().token_budget
            pairs = tokens * work.trained_pairs / work.trained
            step_s = trainer.roofline.train_step_s(
                tokens, pairs, token_budget=TrainingLimits().token_budget, recompute=trainer.recompute
            )
            bubble = 1 + (trainer.layout.pp - 1) / MANY
            seconds = step_s / bubble / tokens * work.trained * self._pace.training_scale
            train_s = self._pace.run_seconds(seconds) * trainer.layout.world / trainer.layout.replicas
        update_s = work.updates * trainer.update()["optimizer"] * trainer.layout.world
        return CardSeconds(self._pace.run_seconds(rank_s) * self._cards_of_rank, train_s + update_s)


@dataclass
class StepRecord:
    """One step, in seconds and tokens of the run. ``seconds``: from its first command to the end of its training;
    ``generate_s``, ``switch_s``, ``train_s``: of the controller's commands, as the timers of a run; ``tail_s``: as
    `timing_s/gen_tail`; ``controller_s``: in which the controller computed or called cards; ``idle_calls_s``: of these,
    the calls for which all cards waited; ``tokens``: of the trained samples; ``groups``: those that were trained, with
    their ``lags`` in versions."""

    seconds: float = 0.0
    generate_s: float = 0.0
    switch_s: float = 0.0
    train_s: float = 0.0
    tail_s: float = 0.0
    controller_s: float = 0.0
    idle_calls_s: float = 0.0
    tokens: int = 0
    groups: list[str] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    work: SimulatedWork = field(default_factory=SimulatedWork)


@dataclass(frozen=True)
class RunTotals:
    """Totals of a run, in seconds of the run; card-seconds are summed over cards. ``generating_card_s``: of the steps
    of engines; ``switching_card_s``: of switches and adoptions; ``training_card_s``: of training; ``slow_card_s``: by
    which slow dies made these longer; ``done``: the work of all trained samples; its decodes are all that were done,
    also of samples that are not trained yet."""

    generating_card_s: float
    switching_card_s: float
    training_card_s: float
    slow_card_s: float
    preemptions: int
    done: SimulatedWork
