from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.model import LocalParam, Parallel, plan_buckets
from fusion.training.shards import shard_range, shard_runs

PARAMS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(["dense", "tp", "expert"])),
    min_size=1,
    max_size=12,
)


@given(PARAMS, st.integers(1, 4), st.integers(40, 400))
def test_shards_cover_each_bucket_once_and_each_element_is_treated_as_its_parameter(params, tp_and_ep, bucket_bytes):
    table = [
        LocalParam(f"p{i}", tuple(shape), (), expert=kind == "expert", tp_sharded=kind == "tp")
        for i, (shape, kind) in enumerate(params)
    ]
    parallel = Parallel(4 * tp_and_ep, tp_and_ep, 2)
    for plan in plan_buckets(table, parallel, 4, bucket_bytes):
        replicas = parallel.edp if plan.expert else parallel.dp
        treatment: dict[int, tuple[bool, bool]] = {}
        end = 0
        for replica in range(replicas):
            start, stop = shard_range(plan, replicas, replica)
            assert start == end
            runs = shard_runs(plan, start, stop)
            for run in runs:
                assert run.start == end and run.stop > run.start
                end = run.stop
                treatment |= dict.fromkeys(range(run.start, run.stop), (run.decay, run.replicated))
            assert end == stop
            for before, after in zip(runs, runs[1:], strict=False):
                assert (before.decay, before.replicated) != (after.decay, after.replicated)
        assert end == plan.numel
        for param, offset in plan.entries:
            wanted = (len(param.shape) > 1, not param.expert and not param.tp_sharded)
            assert all(treatment[offset + i] == wanted for i in range(param.numel))
