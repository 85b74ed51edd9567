"""Record what a simulated run did, step by step."""

from dataclasses import dataclass, field

from stalesync.simulator.work import SimulatedWork


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
