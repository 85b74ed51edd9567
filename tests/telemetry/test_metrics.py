import math
import pickle
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import Metrics, rule_of, throughput

NAMES = ("critic/rewards/mean", "response_length/max", "prompt_length/min", "reward/num_failed", "actor/pg_loss")
figures = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-1e6, 1e6), st.integers(0, 1000)), max_size=40)


def merged(ranks, counts):
    """The metrics of ranks, merged; ``counts[i]``: the weight of rank i's means."""
    whole = Metrics()
    for figures, count in zip(ranks, counts, strict=True):
        of_rank = Metrics()
        of_rank.update(figures, count)
        whole.merge(of_rank)
    return whole.result()


@given(figures, st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranks_fold_to_what_one_accumulator_would_hold(added, ranks, order):
    whole, parts = Metrics(), [Metrics() for _ in range(ranks)]
    for name, value, count in added:
        whole.add(name, value, count)
        order.choice(parts).add(name, value, count)
    order.shuffle(parts)
    while len(parts) > 1:  # any grouping: fold two random ones until one is left
        left, right = (parts.pop(order.randrange(len(parts))) for _ in range(2))
        parts.append(left.merge(pickle.loads(pickle.dumps(right.take()))))
    expected, got = whole.result(), parts[0].result()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-6)


def test_the_rule_stands_in_the_name():
    assert [rule_of(name) for name in NAMES] == ["mean", "max", "min", "sum", "mean"]
    assert rule_of("timing_s/gen") == "seconds"
    assert rule_of("memory/infer/kv_mib") == rule_of("perf/max_memory_allocated_gb") == "max"
    assert rule_of("perf/total_num_tokens") == "sum"


def test_means_are_weighted_and_extremes_and_counts_are_not():
    figures = merged(
        [
            {"critic/rewards/mean": 1.0, "response_length/max": 5, "reward/num_failed": 2, "timing_s/gen": 1.0},
            {"critic/rewards/mean": 0.0, "response_length/max": 9, "reward/num_failed": 3, "timing_s/gen": 4.0},
        ],
        counts=[3, 1],
    )
    assert figures == {
        "critic/rewards/mean": 0.75,
        "response_length/max": 9.0,
        "reward/num_failed": 5.0,
        "timing_s/gen": 4.0,
    }


def test_a_rank_without_tokens_spoils_no_mean():
    metrics = Metrics()
    metrics.add("actor/pg_loss", math.nan, count=0)
    assert metrics.result() == {}
    metrics.add("actor/pg_loss", 2.0, count=4)
    assert metrics.result() == {"actor/pg_loss": 2.0}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_broken_figure_stays_visible(values):
    metrics = Metrics()
    for value in values:
        metrics.add("actor/grad_norm_max", value)
    assert math.isnan(metrics.result()["actor/grad_norm_max"])


def test_one_name_has_one_rule():
    metrics = Metrics()
    metrics.add("stalesync/waits", 1, rule="sum")
    metrics.add("stalesync/waits", 2)
    assert metrics.result() == {"stalesync/waits": 3.0}
    with pytest.raises(ValueError, match="stalesync/waits: rule=max: it is already folded by sum"):
        metrics.add("stalesync/waits", 1, rule="max")
    with pytest.raises(ValueError, match="count=-1"):
        metrics.add("actor/pg_loss", 1, count=-1)


def test_timers_add_up_on_a_rank_and_the_slowest_rank_counts():
    fast, slow = Metrics(), Metrics()
    began_s = time.perf_counter()
    for _ in range(2):
        with fast.timer("gen"):
            time.sleep(0.01)
    longer_s = time.perf_counter() - began_s
    with pytest.raises(KeyError), slow.timer("gen"):
        time.sleep(longer_s)
        raise KeyError
    assert 0.02 <= fast.result()["timing_s/gen"] <= longer_s <= slow.result()["timing_s/gen"]
    assert fast.merge(slow).result()["timing_s/gen"] == slow.result()["timing_s/gen"]


def test_spread_takes_tensors_and_take_starts_afresh():
    metrics = Metrics()
    metrics.spread("critic/rewards", torch.tensor([0.0, 1.0, 0.5, 0.5]))
    metrics.spread("critic/advantages", [])
    assert metrics.result() == {"critic/rewards/mean": 0.5, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0}
    assert metrics.take() and metrics.result() == {}


def test_throughput_is_per_card_as_in_verl():
    assert throughput(tokens=8000, seconds=2.0, cards=4) == {
        "perf/total_num_tokens": 8000.0,
        "perf/time_per_step": 2.0,
        "perf/tokens_per_s": 4000.0,
        "perf/throughput": 1000.0,
    }


def test_a_seeded_random_split_weighs_every_sample_once():
    random.seed(0)
    rewards = [random.random() for _ in range(100)]
    parts = [rewards[:7], rewards[7:50], rewards[50:]]
    folded = merged([{"r/mean": sum(part) / len(part)} for part in parts], [len(part) for part in parts])
    assert folded["r/mean"] == pytest.approx(sum(rewards) / 100)
