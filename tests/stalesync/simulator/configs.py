"""Configs of small paced runs, and their simulation."""

from __future__ import annotations

from dataclasses import replace

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.pace import EngineCost, Pace
from fusion.costmodel.presets import load_shape
from fusion.model import Parallel
from fusion.npu import DeviceConfig
from fusion.resources import SHAPES
from stalesync.job.config import Config
from stalesync.policy.commands import Accumulate, Dispatch, Train
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.lengths import DrawnLengths
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import Overheads, SimulationSetup
from tests.rollouts import changed

PROMPT_TOKENS = 4
NO_OVERHEADS = Overheads(0.0, 0.0, 0.0, 0.0)
"""A host that takes no time: what remains is the work of the cards"""


def config_of(deployment="colocated", max_staleness=0, *, cards=4, prompts=8, group=4, steps=4, speed=96.0, **rollout):
    """Cards under OLMoE-1B-7B, as in benchmarks/stalesync.py; ``rollout``: keys of that group."""
    config = Config()
    config.device = DeviceConfig("emulated", pace="olmoe_7b", pace_tokens=128, pace_speed=speed, pace_training=12.0)
    config.cluster.npus, config.cluster.hardware = cards, "ascend_910c"
    config.data.prompts_per_step, config.algorithm.group_size = prompts, group
    config.fusion.deployment, config.run.steps = deployment, steps
    config.fusion.infer_cards = cards // 2 if deployment in ("separate", "hybrid") else None
    config.stalesync.max_staleness = max_staleness
    values = dict(max_response_length=40, forced_median=8.0, max_seqs=4) | rollout
    config.rollout = changed(config.rollout, **values)
    return config


class RecordedRun(SimulatedRun):
    """Records its decisions in ``made``, as the lines of `recorded_run.py`."""

    def __init__(self, setup, lengths):
        super().__init__(setup, lengths)
        self.made, observe_admitted = [], self.admission.observe_admitted

        def admit(prompt_tokens):
            self.made.append({"kind": "admit", "groups": [*prompt_tokens]})
            observe_admitted(prompt_tokens)

        self.admission.observe_admitted = admit

    def execute(self, command):
        match command:
            case Dispatch(by_engine):
                ids = {str(engine): [*rows.ids] for engine, rows in by_engine.items()}
                self.made.append({"kind": "dispatch", "requests": ids})
            case Accumulate(groups) | Train(groups):
                self.made.append({"kind": "train", "groups": [*groups]})
        super().execute(command)


def simulation_of(config, overheads=None, kv_tokens=None, environment=None, hardware=None):
    cap = config.rollout.max_response_length - (environment.observed if environment else 0)
    forced = ForcedLengths(config.run.seed, config.rollout.sampling.forced_median, cap)
    lengths = DrawnLengths(forced, config.algorithm.group_size, PROMPT_TOKENS)
    setup = SimulationSetup.of(config, kv_tokens=kv_tokens, environment=environment, hardware=hardware)
    setup = replace(setup, overheads=overheads or Overheads())
    return RecordedRun(setup, lengths)


def engine_cost(model="qwen3_30b_a3b", *, layout=None, scale=1, full=16):
    pace = Pace(load_shape(model, SHAPES).shape, hardware_named("ascend_910c"), scale, 1.0)
    return EngineCost(pace, layout or Parallel(), full)
