"""A real run on paced cards and its simulation, with the same lengths, make the same decisions and take as long.

At staleness 0 all decisions agree. Above it, which group is admitted or trained next depends on which of two samples
arrives first, within the milliseconds that queue and controller take; there the runs agree in what does not.
"""

from __future__ import annotations

import json

import pytest

from stalesync.job.overrides import load
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.lengths import SimulatedPrompt, TraceLengths
from stalesync.simulator.setup import SimulationSetup
from tests.helpers import MINIMAL, runnable_checkpoint
from tests.machine import patience
from tests.stalesync.runs import rows_of
from tests.stalesync.simulator.configs import RecordedRun
from tests.warm import launcher

PACED = """device=paced device.pace=olmoe_7b device.pace_tokens=128 device.pace_speed=64 device.pace_training=8
cluster.hardware=ascend_910c cluster.npus=2 data=addition data.max_prompt_length=8 data.prompts_per_step=16
algorithm.group_size=4 rollout.max_response_length=40 rollout.sampling.forced_median=8 rollout.engine.max_seqs=8
run.eval_prompts=0 run.steps=3 run.name=run""".split()


def recorded(folder, *overrides):
    """The run's decisions, in the form of `simulated`, and its folder."""
    runnable_checkpoint(folder / "model", **MINIMAL)
    record = folder / "decisions.jsonl"
    command = ["tests/stalesync/simulator/recorded_run.py", str(record), f"model.path={folder / 'model'}"]
    done = launcher().session().run([*command, f"run.dir={folder}", *PACED, *overrides], timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in record.read_text().splitlines()], folder / "run"


def simulated(run, decisions):
    """The simulation of a run with the prompts that it was given: its decisions, and itself."""
    config = load(run / "config.yaml")
    size = config.algorithm.group_size
    forced = ForcedLengths(config.run.seed, config.rollout.sampling.forced_median, config.rollout.max_response_length)
    prompts = [
        SimulatedPrompt(group, tokens, forced.of_members(group, range(size)))
        for one in decisions
        if one["kind"] == "admit"
        for group, tokens in zip(one["groups"], one["prompt_tokens"], strict=True)
    ]
    simulation = RecordedRun(SimulationSetup.of(config), TraceLengths(prompts))
    simulation.run()
    return simulation.made, simulation


def plain(decision):
    """A decision of the real run, or of the simulated one."""
    return decision["kind"], decision.get("groups", []), decision.get("requests", {})


def groups_of(decisions, kind):
    return [group for one in map(plain, decisions) if one[0] == kind for group in one[1]]


def assert_as_long(real_s, simulated_s, rows, cards):
    """Within 5 %, beside what the emulated cards took longer than the modelled ones. A busy machine only adds."""
    overrun_s = sum(value for row in rows for name, value in row.items() if name.startswith("pace/overrun_s/")) / cards
    late_s = patience(0.1 * len(rows)) - 0.1 * len(rows)
    assert 0.95 * simulated_s <= real_s <= 1.05 * simulated_s + overrun_s + late_s


@pytest.mark.extended
@pytest.mark.parametrize("reward", ["", "reward.latency_s=4"])
def test_at_staleness_0_a_simulation_decides_what_the_run_decided_and_takes_as_long(reward, tmp_path):
    """Two processes score 64 samples a step, each in 4 / 64 s: 2 s."""
    decisions, folder = recorded(tmp_path, *reward.split())
    made, simulation = simulated(folder, decisions)
    assert [plain(one) for one in made] == [plain(one) for one in decisions], "admitted, dispatched, trained: in order"
    rows = rows_of(folder)
    for row, step in zip(rows, simulation.steps, strict=True):
        assert_as_long(row["timing_s/step"], step.seconds, [row], cards=2)
        assert row["perf/total_num_tokens"] == step.tokens
        assert not reward or step.seconds > 2
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    trace = TraceLengths.read(folder / "groups.jsonl", prompt_tokens=1, max_response_tokens=40)
    assert [one.group for one in trace.prompts] == groups_of(decisions, "admit") == [line["group"] for line in lines]
    of_run = {one.group: one.response_tokens for one in simulation._lengths.prompts}
    assert all(of_run[one.group] == one.response_tokens for one in trace.prompts), "a run's groups.jsonl is a trace"


@pytest.mark.extended
@pytest.mark.parametrize("deployment", ["colocated", "separate"])
def test_at_staleness_1_a_simulation_trains_the_same_groups_in_as_long(deployment, tmp_path):
    apart = ["fusion.infer_cards=1"] if deployment == "separate" else []
    decisions, folder = recorded(tmp_path, f"fusion={deployment}", "stalesync.max_staleness=1", *apart)
    made, simulation = simulated(folder, decisions)
    assert [plain(one) for one in made[:2]] == [plain(one) for one in decisions[:2]], "what it begins with"
    for kind in ("admit", "train"):
        assert sorted(groups_of(made, kind)) == sorted(groups_of(decisions, kind))
    assert groups_of(made, "admit") == groups_of(decisions, "admit"), "in the source's order"
    rows = rows_of(folder)
    real_s, simulated_s = sum(row["timing_s/step"] for row in rows), sum(step.seconds for step in simulation.steps)
    assert_as_long(real_s, simulated_s, rows, cards=2)
    assert {lag for step in simulation.steps for lag in step.lags} <= {0, 1}
