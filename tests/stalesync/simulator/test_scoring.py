"""Rewards by rules that take time: what their processes can score, and what a step waits for."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stalesync.job.config import Config
from stalesync.simulator.cards import SimulatedCards, SimulatedRules
from stalesync.simulator.clock import Clock
from stalesync.simulator.environment import EnvironmentSpec
from tests.stalesync.simulator.configs import NO_OVERHEADS, config_of, simulation_of

DEPLOYMENTS = ["colocated", "separate", "hybrid", "full"]


def scored(arrivals, latency_s, workers):
    """Time at which each sample that arrives at one of these times is reported as generated, and as scored."""
    config, clock, began, ended = Config(), Clock(), {}, {}
    config.reward.latency_s, config.reward.workers = latency_s, workers

    def report(samples, ids):
        assert not began.keys() & samples.keys() and not ended.keys() & {*ids}, "each once"
        assert {*ids} <= began.keys(), "generated before it is scored"
        began.update(dict.fromkeys(samples, clock.now))
        ended.update(dict.fromkeys(ids, clock.now))

    rules = SimulatedRules(config.scoring_s, clock, report)
    for number, time in enumerate(arrivals):
        clock.at(time, lambda number=number: rules.put({str(number): 1}))
    while clock.step():
        pass
    return [(began[str(number)], ended[str(number)]) for number in range(len(arrivals))]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.5, 4.0]), max_size=90),
    st.sampled_from([0.25, 1.0]),
    st.integers(1, 6),
)
@example([0.0] * 80, 1.0, 3)
def test_processes_score_each_sample_once_and_no_faster_than_they_can(gaps, latency_s, workers):
    arrivals = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    times = scored(arrivals, latency_s, workers)
    for arrived, (began, ended) in zip(arrivals, times, strict=True):
        assert arrived <= began and began + latency_s <= ended + 1e-9
    for first in range(len(times)):
        took_s = max(ended for _, ended in times[first:]) - arrivals[first]
        assert took_s >= (len(times) - first) * latency_s / workers - 1e-9
    if times:
        last, slower = (max(ended for _, ended in of) for of in (times, scored(arrivals, 2 * latency_s, workers)))
        assert slower >= last - 1e-9, "batches may merge, but not so that twice the latency ends earlier"


def simulated(config, latency_s=0.0, workers=2, **options):
    """The run with rewards of this latency, in modelled seconds."""
    config.reward.latency_s, config.reward.workers = latency_s, workers
    run = simulation_of(config, **{"overheads": NO_OVERHEADS} | options)
    run.run()
    return run


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(DEPLOYMENTS), st.integers(0, 2), st.integers(1, 8), st.integers(0, 99))
def test_rewards_bound_a_run_by_their_processes_and_every_group_is_trained_within_the_bound(
    deployment, bound, workers, seed
):
    config = config_of(deployment, bound, steps=3)
    config.run.seed = seed
    samples = config.run.steps * config.data.prompts_per_step * config.algorithm.group_size
    alone_s = simulated(config).clock.now
    for factor in (0.1, 1, 4):  # of what generation and training take
        latency_s = factor * alone_s * config.device.pace_speed * workers / samples
        run = simulated(config, latency_s, workers)
        trained = [group for step in run.steps for group in step.groups]
        assert len(trained) == len({*trained}) == config.run.steps * config.data.prompts_per_step
        assert all(0 <= lag <= bound for step in run.steps for lag in step.lags), "the ledger asserts it, too"
        assert run.clock.now >= factor * alone_s, "samples × latency / workers"
        if bound == 0:
            assert run.clock.now > alone_s
    assert run.clock.now < (factor + 2) * alone_s, "rewards are the bottleneck: all else overlaps, or is as before"


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(DEPLOYMENTS), st.integers(1, 8), st.integers(0, 99))
def test_the_time_of_a_synchronous_step_never_falls_as_the_latency_grows(deployment, workers, seed):
    config = config_of(deployment, 0, steps=2)
    config.run.seed = seed
    runs = [simulated(config, latency_s, workers) for latency_s in (0.0, 0.5, 1.0, 4.0, 16.0, 64.0)]
    for faster, slower in zip(runs, runs[1:], strict=False):
        for one, other in zip(faster.steps, slower.steps, strict=True):
            assert other.groups == one.groups and other.seconds >= one.seconds - 1e-9
    assert runs[-1].clock.now > runs[0].clock.now


def test_without_latency_the_number_of_processes_changes_nothing():
    def steps(workers):
        return simulated(config_of("hybrid", 1), 0.0, workers, overheads=None).steps

    assert steps(1) == steps(8)


def test_a_reference_starts_when_the_rewards_of_a_group_have_come(monkeypatch):
    """With as many processes as samples, a group is complete one latency behind its last sample, or two."""
    config = config_of("colocated", 0, prompts=8, steps=1)
    config.algorithm.kl_coef, config.fusion.score_cards = 0.1, 2
    config.cluster.npus += 2
    latency_s, begun, came = 40.0, {}, {}
    begin, put = SimulatedCards.begin_reference, SimulatedCards._put

    def begin_reference(self, groups):
        begun.update(dict.fromkeys(groups, self.clock.now))
        begin(self, groups)

    def put_samples(self, engine, samples):
        came.update(dict.fromkeys([id.rpartition("/")[0] for id in samples], self.clock.now))
        put(self, engine, samples)

    monkeypatch.setattr(SimulatedCards, "begin_reference", begin_reference)
    monkeypatch.setattr(SimulatedCards, "_put", put_samples)
    simulated(config, latency_s, workers=64)
    assert begun.keys() == came.keys() and len(begun) == 8
    later = [(begun[group] - came[group]) * config.device.pace_speed / latency_s for group in begun]
    assert all(0.999 <= one <= 2.001 for one in later) and min(later) < 1.5
    simulated(config, 0.0)
    assert begun == came


def test_conversations_are_scored_when_they_have_ended():
    config, latency_s = config_of("colocated", 0, steps=2), 500.0
    conversations = EnvironmentSpec(2, 4, latency_s=1.0)
    fast = simulated(config, environment=conversations)
    slow = simulated(config, latency_s, workers=64, environment=conversations)
    for one, other in zip(fast.steps, slow.steps, strict=True):
        assert one.groups == other.groups
        assert other.seconds >= one.seconds + 0.999 * latency_s / config.device.pace_speed
