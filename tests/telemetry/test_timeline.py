import json
import multiprocessing
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import Span, Timeline, TimelineFile, read_timeline, summarize, wall_ns
from tests.helpers import processes

spans = st.lists(
    st.builds(
        lambda card, kind, start, length: Span(card, kind, kind, start, start + length),
        st.sampled_from(["card 0", "card 1", "card 2"]),
        st.sampled_from(["gen", "train", "switch", "wait_data"]),
        st.integers(0, 300),
        st.integers(0, 200),
    ),
    max_size=30,
)


def owner(recorded: list[Span], card: str, instant: int) -> str:
    """Who has this nanosecond, by the words of the invariant."""
    there = [span for span in recorded if span.card == card and span.start_ns <= instant < span.end_ns]
    if not there:
        return "idle"
    return min(there, key=lambda span: (-span.start_ns, span.end_ns, span.kind)).kind


@given(spans, st.integers(0, 400), st.integers(0, 400), st.randoms(use_true_random=False))
def test_parts_add_up_to_wall_and_every_instant_has_one_owner(recorded, one, other, order):
    start, end = sorted((one, other))
    summary = summarize(recorded, start, end, cards=["card 0"])
    for card in summary:
        assert sum(card.by_kind_ns.values()) + card.idle_ns == card.wall_ns == end - start
        counted = Counter(owner(recorded, card.card, instant) for instant in range(start, end))
        assert Counter(card.by_kind_ns) + Counter(idle=card.idle_ns) == counted
        assert card.busy_ns == card.wall_ns - card.idle_ns - card.by_kind_ns.get("wait_data", 0)
    order.shuffle(recorded)
    assert summarize(recorded, start, end, cards=["card 0"]) == summary


def test_nested_spans_count_once_and_the_rest_is_idle():
    step, inner = Span("c", "step", "step", 0, 100), Span("c", "decode", "gen", 20, 50)
    [card] = summarize([step, inner, Span("c", "x", "x", 110, 120)])
    assert card.by_kind_ns == {"step": 70, "gen": 30, "x": 10} and card.idle_ns == 10 and card.wall_ns == 120
    assert card.utilisation == pytest.approx(110 / 120)
    assert summarize([]) == []


def record(card: str, pipe) -> None:
    timeline = Timeline(card)
    with timeline.span("decode", kind="gen"):
        time.sleep(0.02)
    pipe.send(timeline.drain())


def test_processes_record_on_one_clock():
    before, recorded = wall_ns(), []
    for card in ("card 0", "card 1"):
        ours, theirs = multiprocessing.Pipe()
        child = processes().Process(target=record, args=(card, theirs))
        child.start()
        recorded += ours.recv()
        child.join()
    after = wall_ns()
    first, second = recorded
    slack = 2_000_000  # the wall clocks of processes are read apart
    assert before - slack <= first.start_ns < first.end_ns <= second.start_ns + slack
    assert second.end_ns <= after + slack and abs(after - time.time_ns()) < 1e9
    assert [card.card for card in summarize(recorded)] == ["card 0", "card 1"]


def test_a_timeline_that_nobody_drains_keeps_nothing():
    timeline = Timeline("card 0", max_spans=0)
    with timeline.span("train"):
        pass
    assert timeline.drain() == []


def test_nothing_is_lost_while_threads_record_and_one_drains():
    timeline, drained = Timeline("c"), []
    threads = [threading.Thread(target=lambda: [timeline.add("x", 0, 1) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += timeline.drain()
    assert len(drained + timeline.drain()) == 20000 and timeline.drain() == []


def test_a_raising_block_is_recorded_and_time_does_not_run_backwards():
    clock = iter(range(0, 100, 10))
    timeline = Timeline("c", clock_ns=lambda: next(clock))
    with pytest.raises(KeyError), timeline.span("train"):
        raise KeyError
    assert timeline.drain() == [Span("c", "train", "train", 0, 10)]
    with pytest.raises(ValueError, match="before start_ns"):
        timeline.add("x", 5, 4)


def test_the_trace_is_valid_json_after_every_append_and_reads_back(tmp_path):
    path, written = tmp_path / "timeline.json", []
    file = TimelineFile(path, origin_ns=1_700_000_000_000_000_000)
    for step in range(5):
        start = 1_700_000_000_000_000_000 + step * 1_000_003
        written += [Span(f"card {step % 2}", "décode", "gen", start, start + 7, lane) for lane in ("main", "copy")]
        file.append(written[-2:])
        trace = json.loads(path.read_text())
        assert read_timeline(path) == written
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert sorted(named.values()) == ["card 0", "card 1"]
    file.close()
    again = TimelineFile(path)
    assert again.origin_ns == file.origin_ns
    again.append(written[:1])
    assert read_timeline(path) == written + written[:1] and json.loads(path.read_text())


def test_what_is_inside_is_written_after_what_it_is_inside_of(tmp_path):
    file = TimelineFile(tmp_path / "timeline.json", origin_ns=0)
    inner, stage = Span("c", "prefill", "prefill", 5, 8), Span("c", "generate", "gen", 5, 20)
    file.append([inner, Span("c", "decode", "decode", 8, 20), stage])
    assert [span.name for span in read_timeline(file.path)] == ["generate", "prefill", "decode"]


@pytest.mark.parametrize("cut", [1, 3, 4, 20, 60, 100, 200])
def test_a_trace_cut_anywhere_is_mended(tmp_path, cut):
    path = tmp_path / "timeline.json"
    written = [Span("c", "x", "x", 1000 * i, 1000 * i + 10) for i in range(20)]
    TimelineFile(path, origin_ns=0).append(written)
    path.write_bytes(path.read_bytes()[:-cut])
    left = read_timeline(path)
    assert len(left) >= 16 and left == written[: len(left)]
    TimelineFile(path)
    assert len(json.loads(path.read_text())["traceEvents"]) == len(left) + 2


def test_spans_of_several_cards_are_written_as_if_one_after_the_other(tmp_path):
    cards = [[Span(f"card {n}", "b", "gen", 7 - n, 9), Span(f"card {n}", "a", "gen", 3, 8)] for n in (1, 0)]
    each, together = (TimelineFile(tmp_path / name, origin_ns=0) for name in ("each", "together"))
    for spans in cards:
        each.append(spans)
    together.append(*cards)
    assert (tmp_path / "each").read_bytes() == (tmp_path / "together").read_bytes()
