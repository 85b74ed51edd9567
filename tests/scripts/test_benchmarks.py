"""What the benchmarks compute and choose, apart from what they measure."""

import json
import random
import sys
import time
from dataclasses import replace

import pytest

from benchmarks import backends, rollout
from benchmarks.drafts import FIRST, MEASURED, SIDES, WORKLOAD, compared
from benchmarks.growth_run import growth_of_floor, growth_of_memory
from benchmarks.harness import Benchmark, Option, in_rotation, in_turns, leaves, rendered
from benchmarks.harness import compared as checked
from benchmarks.paced import Measured, Mode
from benchmarks.rollout_workloads import WORKLOADS
from benchmarks.runs import follow, new_lines
from benchmarks.switch import floor_of
from benchmarks.trl import figures_of, summary
from stalesync.prompts.lengths import ForcedLengths
from tests.rollout.drafts.modelled_engines import Cluster


def test_every_side_runs_once_a_round_and_first_as_often_as_any_other():
    rounds = [in_rotation(["a", "b", "c"], round) for round in range(-1, 5)]
    assert rounds[:3] == [["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"]]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert sorted(names[0] for names in rounds) == ["a", "a", "b", "b", "c", "c"]


def test_rounds_that_warm_up_are_run_and_left_out():
    ran = []
    sides = {name: lambda round, name=name: ran.append((round, name)) or (name, round) for name in "ab"}
    assert in_turns(sides, 2) == {"a": [("a", 0), ("a", 1)], "b": [("b", 0), ("b", 1)]}
    assert ran == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


BENCHMARK = Benchmark(
    "Of nothing.",
    [Option("rounds", 7, smoke=1, help="rounds"), Option("sizes", (8, 9), smoke=(1,)), Option("fast", False, help="x")],
    "*.ratio >= 0.9, two.seconds <= 1",
    parts={"one": f"{__name__}:measure", "two": f"{__name__}:measure"},
    check=lambda args: "--rounds is of two" if "rounds" in args.given and args.parts == ["one"] else "",
)


def measure(args):
    return {"ratio": 0.5, "seconds": 0.25 * args.rounds, "sizes": args.sizes, "details": [{"x": 1}]}


def test_smoke_has_toy_sizes_where_none_is_given(capsys):
    args = BENCHMARK.parse([])
    assert (args.rounds, args.sizes, args.fast, args.parts) == (7, (8, 9), False, ["one", "two"])
    args = BENCHMARK.parse(["--smoke", "--only", "two"])
    assert (args.rounds, args.sizes, args.parts) == (1, (1,), ["two"])
    assert BENCHMARK.parse(["--smoke", "--rounds", "3", "--fast"]).rounds == 3
    for wrong, why in (
        ("--only three", "expected some of one, two, got three"),
        ("--only one --rounds 2", "is of two"),
    ):
        with pytest.raises(SystemExit):
            BENCHMARK.parse(wrong.split())
        assert why in capsys.readouterr().err


def test_figures_are_written_with_machine_and_commit_and_checked_against_their_targets(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    BENCHMARK.main(["--json", str(tmp_path / "figures")])
    result = json.loads((tmp_path / "figures").read_text())
    assert result["figures"]["two"]["seconds"] == 1.75 and result["machine"].keys() >= {"commit", "cpu", "load"}
    missed = ["MISSED one.ratio: 0.5, target >= 0.9", "MISSED two.ratio: 0.5, target >= 0.9"]
    assert result["checked"] == [*missed, "MISSED two.seconds: 1.75, target <= 1"]
    assert "MISSED two.seconds" in capsys.readouterr().out


def test_a_target_is_checked_where_it_was_measured():
    figures = {"decode": {"us_at_64": 1001.0, "intercept_us": 7.0}, "calls": {"growth": 0}, "none": {"us_at_64": None}}
    lines = checked(figures, "*.us_at_64 <= 1000, calls.growth <= 0, absent >= 1")
    assert [line.split()[:2] for line in lines] == [["MISSED", "decode.us_at_64:"], ["ok", "calls.growth:"]]


def test_rows_that_have_the_same_names_are_shown_as_a_table_and_details_are_left_to_the_file():
    figures = {"a": {"x": 1, "y": 0.25}, "b": {"x": 20000.5, "y": None}, "best": "a", "kills": [{"pid": 1}]}
    assert [line.split() for line in rendered(figures)] == [
        ["best", "a"],
        ["x", "y"],
        ["a", "1", "0.25"],
        ["b", "20,000", "None"],
    ]
    assert dict(leaves(figures)) == {"a.x": 1, "a.y": 0.25, "b.x": 20000.5, "b.y": None} | {
        name: figures[name] for name in ("best", "kills")
    }


@pytest.mark.parametrize(
    ("shared", "wire", "floor_s"),
    [(2.5, "shared", 2.5 + 0.25), (4.0, "p2p", 2.0 + 1.0 + 0.25)],
)
def test_only_wires_that_need_packed_bytes_pay_for_packing(shared, wire, floor_s):
    seconds = {"all_to_all": 3.0, "p2p": 2.0, "shared": shared, "memcpy": 1.0, "local": 0.25}
    assert floor_of(seconds) == (wire, floor_s)


RUN = """
import json, sys, time
from pathlib import Path
home, count = Path(sys.argv[1]), int(sys.argv[2])
(home / "run").mkdir()
for step in range(count):
    with (home / "run" / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step}), file=file)
    time.sleep(0.05)
if count > 100:
    time.sleep(60)
sys.exit(count == 3)
"""


def test_a_run_is_followed_to_its_end_or_until_enough_is_seen(tmp_path):
    def command(name, count):
        return [sys.executable, "-c", RUN, str(tmp_path / name), str(count)], tmp_path / name

    rows = follow(*command("whole", 5))
    assert [row["step"] for _, row in rows] == [*range(5)] and rows[0][0] < rows[-1][0]
    begin_s = time.monotonic()
    rows = follow(*command("long", 1000), until=lambda rows: len(rows) >= 4)
    assert len(rows) >= 4 and time.monotonic() - begin_s < 40, "it was stopped"
    with pytest.raises(SystemExit, match="exit status 1 after 3 steps"):
        follow(*command("failed", 3))
    with pytest.raises(SystemExit, match="after 5 steps"):
        follow(*command("short", 5), until=lambda rows: len(rows) >= 9)


def test_a_growing_file_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "rows"
    assert new_lines(path, 0) == ([], 0)
    path.write_text("a\nb\nhal")
    assert new_lines(path, 0) == (["a", "b"], 4)
    path.write_text("a\nb\nhalf\n")
    assert new_lines(path, 4) == (["half"], 9) and new_lines(path, 9) == ([], 9)


def run_of(step_s, reached_s, steps=9, reward=0.9):
    return {"step_s": step_s, "reached_s": reached_s, "steps": steps, "reward": pytest.approx(reward)}


def test_a_run_reaches_its_reward_by_the_mean_of_five_steps_and_counts_its_first_step():
    times, rewards = [10.0, 12.0, 13.0, 14.0, 15.0, 16.0], [0.5, 0.9, 0.9, 0.9, 0.9, 0.9]
    assert figures_of(times, rewards) == run_of(1.0, 7.0, steps=6)
    assert figures_of(times[:5], rewards[:5])["reached_s"] is None


def test_a_ratio_is_that_of_medians_and_absent_where_a_round_did_not_get_there():
    runs = {"rlfusion": [run_of(step_s, 10.0) for step_s in (1.0, 2.0, 9.0)]}
    assert "step_ratio" not in summary(runs)
    runs["trl"] = [run_of(step_s, 30.0) for step_s in (3.0, 9.0, 1.0)]
    assert summary(runs)["step_ratio"] == 1.5 and summary(runs)["reached_ratio"] == 3.0
    runs["trl"][0] = run_of(3.0, None, reward=0.4)
    assert summary(runs)["trl_reached_s"] is None and "reached_ratio" not in summary(runs)


def test_a_step_in_which_a_card_was_late_on_any_side_is_left_out_on_all():
    def row(step_s, tail_s, overrun_s=0.0):
        seconds = {"timing_s/step": step_s, "timing_s/gen_tail": tail_s, "pace/overrun_s/decode": overrun_s}
        return seconds | {"pace/modelled_s/decode": 100.0, "rollout/tokens_per_forward_mean": 1.0}

    rows = {side: [row(10.0, 2.0) for _ in range(MEASURED)] for side in SIDES}
    rows["probe"] = [row(5.0, 1.0) for _ in rows["none"]]
    rows["drafts"][1] = row(99.0, 9.0, overrun_s=4.0)
    rows["probe"][3] = row(99.0, 9.0, overrun_s=4.0)
    found = compared(rows)
    assert FIRST == 3 and found["steps"] == 3 and found["all"]["ratio"] == 2.0 and found["all"]["tail_cut"] == 0.5
    assert found["first"]["none"]["step_s"] == 10.0 * WORKLOAD.speed
    rows["probe"][4] = row(99.0, 9.0, overrun_s=4.0)
    assert "second" not in compared(rows)


def test_the_work_conserving_bound_spreads_full_batches_over_all_cards():
    row = {
        "timing_s/step": 10.0,
        "perf/total_num_tokens": 5120.0,
        "rollout/generated_tokens": 4096.0,
        "response_length/mean": 8.0,
        "pace/ideal_s/decode": 8.0,
        "pace/ideal_s/prefill": 4.0,
        "pace/ideal_s/train": 16.0,
        "pace/modelled_s/decode": 16.0,
        "staleness/lag_2_count": 3.0,
    }
    measured = Measured(Mode("hybrid", 1, 2), WORKLOAD, [row])
    assert measured.bound_s(measured) == (8.0 + 4.0 + 16.0) / 8, "every token decoded and trained, once"
    figures = measured.figures()
    assert figures["ratio_to_bound"] == 0.35 and figures["utilisation"] == 0.35 and figures["stale_beyond_bound"] == 1
    assert Mode("hybrid", 1, 2).overrides()[-1] == "fusion.infer_cards=2" and Mode("colocated", 0).warm == 1


def test_the_split_of_separate_is_that_at_which_the_work_of_a_step_would_be_done_first():
    work = {"pace/ideal_s/decode": 9.0, "pace/ideal_s/prefill": 3.0, "pace/ideal_s/train": 1.0}
    measured = Measured(Mode("colocated", 0), replace(WORKLOAD, cards=4), [work])
    assert [measured.separate_s(generating, ahead=False) for generating in (1, 2, 3)] == [12 + 1 / 3, 6 + 1 / 2, 4 + 1]
    assert [measured.separate_s(generating, ahead=True) for generating in (1, 2, 3)] == [12, 6, 4]
    assert measured.best_split(ahead=False) == measured.best_split(ahead=True) == 3
    work["pace/ideal_s/train"] = 7.0
    assert (measured.best_split(ahead=False), measured.best_split(ahead=True)) == (2, 2)


def test_growth_is_that_of_the_last_steps_over_those_that_follow_the_first():
    sizes = [100 + step * (step < 50) + 10 * (step > 190) for step in range(200)]
    records = [{"memory": {"worker 7": size} | ({} if size == 110 else {"reward 8": 1})} for size in sizes]
    assert growth_of_memory(records, 50) == {"worker 7": (100, 104.5)}
    assert growth_of_memory(records[:5], 2) == {"worker 7": (102, 104), "reward 8": (1, 1)}


def test_the_floor_of_growth_is_that_of_the_same_time():
    records = [{"time": 10.0 + step / 2} for step in range(100)]  # the tenths last from 35 to 39.5 s, and from 55 s on
    idle = [{"time": float(second), "memory": {"gcs 1": 100 + second, "x 2": second}} for second in range(70)]
    del idle[58]["memory"]["x 2"]
    assert growth_of_floor(idle, records, 50) == {"gcs 1": (137.0, 157.0)}


def test_an_engine_that_is_sent_text_decodes_the_rest_of_a_group_in_fewer_passes():
    draw = random.Random(1)
    text = [draw.randrange(50) for _ in range(60)]
    forwards = {}
    for shares in (False, True):
        cluster = Cluster(2, shares, siblings=True, history=False)
        for engine, ids in ((0, range(1)), (1, range(1, 8))):
            cluster.engines[engine].waiting[0] = [(f"1-0/{i}", text) for i in ids]
            cluster.run(1, slots=1)
        assert sum(engine.tokens for engine in cluster.engines) == 8 * 60
        assert all(engine.idle for engine in cluster.engines)
        forwards[shares] = sum(engine.forwards for engine in cluster.engines)
    assert forwards[True] < forwards[False] - 30 and forwards[False] < 8 * 60 / 2
    assert cluster.store_s > 0 and cluster.exchange_s > 0 and cluster.steps > 0


def test_a_mode_is_compared_by_seed_and_with_what_is_published():
    found = rollout.compared([100.0, 200.0], [150.0, 200.0], published=1.0)
    assert found["ratio"] == 1.25 and found["deviation"] == 0.25 and found["spread"] == pytest.approx(0.5**1.5)
    assert "deviation" not in rollout.compared([100.0], [150.0])
    assert WORKLOADS["rhyme"].ratio.keys() < rollout.RHYME.keys()


def test_published_workloads_have_the_mean_length_that_is_published():
    for name in ("moonlight", "qwen2_vl_72b", "kimi_k2"):
        workload = WORKLOADS[name]
        mean = ForcedLengths(0, workload.median_tokens, workload.max_tokens, (*workload.spread, 0.0)).mean
        assert mean == pytest.approx(workload.mean_tokens, rel=1e-6) and workload.kv_tokens > workload.max_tokens
        assert workload.ratio.keys() < rollout.REPLAYED.keys()
        part = workload.fewer(40)
        assert part.requests % part.group_size == 0 and 0 < part.requests <= workload.requests / 40


def test_engines_are_compared_round_by_round():
    seconds = {"embedded": [2.0, 4.0, 3.0], "vllm": [2.0, 2.0, 8.0], "vllm_plain": [2.0, 1.0, 4.0]}
    figures = backends.engine_summary(seconds | {"vllm_alone": [1.0, 1.5, 8.0]}, tokens=96)
    assert figures["embedded"] == {"gen_tokens_per_s": 32.0}
    assert figures["vllm_plain"]["over_vllm"] == 0.5 and figures["vllm_alone"]["over_vllm"] == 0.75
    assert backends.engine_summary({"embedded": [2.0]}, tokens=96) == {"embedded": {"gen_tokens_per_s": 48.0}}
