from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import MemoryLedger, human_bytes

records = st.lists(
    st.tuples(
        st.sampled_from(["infer", "train", "to_train"]),
        st.dictionaries(st.sampled_from(["weights", "kv", "optimizer"]), st.integers(0, 2**40)),
        st.integers(0, 2**40),
        st.none() | st.integers(0, 2**40),
    ),
    max_size=12,
)


def filled(recorded) -> MemoryLedger:
    ledger = MemoryLedger()
    for phase, by_owner, peak, *capacity in recorded:
        ledger.record(phase, by_owner, peak, capacity=capacity[0] if capacity else None)
    return ledger


@given(records, st.integers(0, 12))
def test_merging_cards_gives_what_one_ledger_would_hold_and_metrics_tell_it_all(recorded, cut):
    whole = filled(recorded)
    merged = MemoryLedger.merged([filled(recorded[:cut]), filled(recorded[cut:])])
    assert (merged.by_owner, merged.peak, merged.capacity) == (whole.by_owner, whole.peak, whole.capacity)
    others = {"perf/throughput": 1.0, "memory/odd": 2.0, "memory/infer/x_mib": None}
    told = MemoryLedger.from_metrics(whole.metrics() | others)
    assert (told.by_owner, told.peak, told.capacity) == (whole.by_owner, whole.peak, whole.capacity)


@given(records)
def test_the_highest_is_kept_in_any_order(recorded):
    ledger = filled(recorded)
    for phase in ledger.phases:
        assert ledger.peak[phase] == max(peak for name, _, peak, _ in recorded if name == phase)
        for owner, held in ledger.by_owner[phase].items():
            assert held == max(owners[owner] for name, owners, *_ in recorded if name == phase and owner in owners)


def test_metrics():
    ledger = filled([("infer", {"weights": 2**20, "kv": 3 * 2**20}, 2**30), ("train", {"optimizer": 2**21}, 2**29)])
    assert ledger.metrics() == {
        "memory/infer/weights_mib": 1.0,
        "memory/infer/kv_mib": 3.0,
        "memory/infer/peak_mib": 1024.0,
        "memory/train/optimizer_mib": 2.0,
        "memory/train/peak_mib": 512.0,
        "perf/max_memory_allocated_gb": 1.0,
    }
    assert MemoryLedger().metrics() == {}


def test_the_capacity_is_that_of_the_smallest_card():
    ledger = filled([("infer", {}, 0, 2**33), ("train", {}, 0, 2**31), ("train", {}, 0, None)])
    assert ledger.metrics()["memory/capacity_mib"] == 2048


@given(st.integers(0, 2**55))
def test_human_bytes_fit_their_column_and_are_right_to_a_percent(count):
    text = human_bytes(count)
    unit = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50}.get(text[-1], 0)
    assert len(text) <= 5
    assert abs(float(text.rstrip("KMGTP")) * 2**unit - count) <= 0.01 * count
