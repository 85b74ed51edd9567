import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import Span, Timeline, summarize
from fusion.telemetry.stage_strip import MAX_RUNS, StageStrip, StripRun
from tests.machine import within

KINDS = ["prefill", "decode", "wait_data", "put"]
START_NS = 1_000
short, long = st.integers(0, 3_000_000), st.integers(0, 10**9)
pieces = st.lists(st.tuples(st.sampled_from(KINDS), st.one_of(short, long)), max_size=150)


def strip_of(pieces: Iterable[tuple[str, int]], max_runs: int) -> tuple[StageStrip, list[StripRun]]:
    """The strip, and every piece as it was marked."""
    strip, now, exact = StageStrip(START_NS, max_runs), START_NS, []
    for kind, length in pieces:
        exact.append(StripRun(kind, now, now + length))
        now += length
        strip.mark(kind, now)
    return strip, exact


def until(runs: Iterable[StripRun], instant: int) -> Counter[str]:
    """Nanoseconds by kind from the start to an instant."""
    counts: Counter[str] = Counter()
    for kind, start, end in runs:
        counts[kind] += max(0, min(end, instant) - start)
    return +counts


@given(pieces, st.integers(len(KINDS), 20))
def test_runs_are_few_without_gaps_and_exact_in_seconds(marked, most):
    strip, exact = strip_of(marked, most)
    runs = strip.runs()
    end = exact[-1].end_ns if exact else START_NS
    assert all(one.end_ns == other.start_ns and one.kind != other.kind for one, other in pairwise(runs))
    assert not runs or (runs[0].start_ns, runs[-1].end_ns) == (START_NS, end)
    assert until(runs, end) == until(exact, end)
    assert len(runs) <= most
    for instant in {at for run in (*runs, *exact) for at in run[1:]}:
        then, truly = until(runs, instant), until(exact, instant)
        assert all(abs(then[kind] - truly[kind]) <= strip.blur_ns for kind in KINDS)
    assert runs == strip.runs()


@given(pieces)
def test_few_runs_are_what_was_marked(marked):
    strip, exact = strip_of(marked, max_runs=len(marked) or 1)
    assert strip.blur_ns == 0
    merged: list[StripRun] = []
    for run in exact:
        if run.start_ns == run.end_ns:
            continue
        if merged and merged[-1].kind == run.kind:
            run = StripRun(run.kind, merged.pop().start_ns, run.end_ns)
        merged.append(run)
    assert strip.runs() == merged


def test_a_long_tail_stays_where_it_was_among_thousands_of_steps():
    steps = [("prefill" if step % 3 == 0 else "decode", 4_000_000) for step in range(15_000)]
    strip, _ = strip_of([*steps, ("wait_data", 10**10)], MAX_RUNS)
    runs = strip.runs()
    assert len(runs) <= MAX_RUNS and strip.blur_ns < 5e9
    assert runs[-1] == StripRun("wait_data", START_NS + 60 * 10**9, START_NS + 70 * 10**9)


def test_more_kinds_than_runs_are_shown_all():
    strip, exact = strip_of([(str(kind), 5) for kind in range(5)] * 3, max_runs=3)
    assert [run.kind for run in strip.runs()] == list("01234") and until(strip.runs(), 999_999) == until(exact, 999_999)


def test_runs_of_a_stage_are_spans_inside_it_also_when_it_raises():
    clock = iter([0, 10, 25, 30, 50, 60])
    timeline = Timeline("c", clock_ns=lambda: next(clock))
    try:
        with timeline.span("generate", kind="gen"), timeline.strip() as mark:
            mark("prefill")
            mark("switch/kv")
            mark("switch/kv")
            raise KeyError
    except KeyError:
        pass
    spans = timeline.drain()
    assert spans == [
        Span("c", "prefill", "prefill", 10, 25),
        Span("c", "kv", "switch/kv", 25, 50),
        Span("c", "generate", "gen", 0, 60),
    ]
    [card] = summarize(spans)
    assert card.by_kind_ns == {"prefill": 15, "switch/kv": 25, "gen": 20}


def test_a_mark_costs_next_to_nothing():
    timeline = Timeline("c")
    with timeline.strip() as mark:
        start = time.perf_counter()
        for step in range(20_000):
            mark("prefill" if step % 3 == 0 else "decode")
        seconds = time.perf_counter() - start
    assert len(timeline.drain()) <= MAX_RUNS
    assert within(seconds, 20_000 * 50e-6), "a few microseconds, on a host that does other things too"
