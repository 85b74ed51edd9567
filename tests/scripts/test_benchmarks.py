"""What the benchmarks compute and choose, apart from what they measure."""

import random
from types import SimpleNamespace

import pytest

from benchmarks import backends, backends_engines, drafts_sides, rollout_rhyme
from benchmarks.drafts_paced import EPOCHS, SIDES, LongAnswers, compared
from benchmarks.growth import misses
from benchmarks.growth_run import calls_of_a_step, growth_of_floor, growth_of_memory
from benchmarks.rollout_workloads import RHYME
from benchmarks.rotation import in_rotation
from benchmarks.stalesync_modes import Mode, Workload, log_of, new_home
from benchmarks.switch_floor import floor_of
from benchmarks.trl import Figures, figures_of, new_lines, summary


def test_every_side_runs_once_a_round_and_first_as_often_as_any_other():
    rounds = [in_rotation(["a", "b", "c"], round) for round in range(-1, 5)]
    assert rounds[:3] == [["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"]]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert sorted(names[0] for names in rounds) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("shared", "wire", "floor_s"),
    [(2.5, "shared", 2.5 + 0.25), (4.0, "p2p", 2.0 + 1.0 + 0.25)],
)
def test_only_wires_that_need_packed_bytes_pay_for_packing(shared, wire, floor_s):
    seconds = {"all_to_all": 3.0, "p2p": 2.0, "shared": shared, "memcpy": 1.0, "local": 0.25}
    assert floor_of(seconds) == (wire, floor_s)


def test_backends_are_compared_round_by_round_and_to_the_floor():
    seconds = {"floor": [1.0, 2.0, 9.0], "embedded": [2.0, 4.0, 20.0], "megatron": [3.0, 8.0, 10.0]}
    figures = backends.summary(seconds)
    assert figures["embedded_to_floor"] == 2.0 and figures["megatron_to_embedded"] == 1.5
    assert backends.summary({"floor": [2.0], "embedded": [3.0]}) == {
        "floor_s": 2.0,
        "embedded_s": 3.0,
        "embedded_to_floor": 1.5,
    }


def test_a_mode_that_is_repeated_has_a_folder_of_its_own(tmp_path):
    mode, workload = Mode("colocated", 1), Workload(training=8.0)
    homes = []
    for _ in range(3):
        homes.append(new_home(tmp_path, mode, workload))
        log_of(homes[-1]).touch()
    assert len({*homes}) == 3


def test_a_run_reaches_its_reward_by_the_mean_of_five_steps_and_counts_its_first_step():
    times, rewards = [10.0, 12.0, 13.0, 14.0, 15.0, 16.0], [0.5, 0.9, 0.9, 0.9, 0.9, 0.9]
    assert figures_of(times, rewards) == Figures(step_s=1.0, reached_s=7.0, steps=6, reward=pytest.approx(0.9))
    assert figures_of(times[:5], rewards[:5]).reached_s is None


def test_a_ratio_is_that_of_medians_and_absent_where_a_round_did_not_get_there():
    runs = {"rlfusion": [Figures(step_s, 10.0, 9, 0.9) for step_s in (1.0, 2.0, 9.0)]}
    runs["trl"] = [Figures(step_s, 30.0, 9, 0.9) for step_s in (3.0, 9.0, 1.0)]
    assert summary(runs)["step_ratio"] == 1.5 and summary(runs)["reached_ratio"] == 3.0
    runs["trl"][0] = Figures(3.0, None, 9, 0.4)
    assert summary(runs)["trl_reached_s"] is None and "reached_ratio" not in summary(runs)


def test_a_step_in_which_a_card_was_late_on_any_side_is_left_out_on_all():
    def row(step_s, tail_s, overrun_s=0.0):
        seconds = {"timing_s/step": step_s, "timing_s/gen_tail": tail_s, "pace/overrun_s/decode": overrun_s}
        return seconds | {"pace/modelled_s/decode": 100.0, "rollout/tokens_per_forward_mean": 1.0}

    rows = {side: [row(10.0, 2.0) for _ in range(EPOCHS["second"].stop)] for side in SIDES}
    rows["probe"] = [row(5.0, 1.0) for _ in rows["none"]]
    rows["drafts"][1] = row(99.0, 9.0, overrun_s=4.0)
    rows["probe"][3] = row(99.0, 9.0, overrun_s=4.0)
    found = compared(rows)
    assert found["steps"] == 3 and found["ratio"] == 2.0 and found["tail_cut"] == 0.5
    assert found["first"]["none"]["step_s"] == 10.0 * LongAnswers().speed
    rows["probe"][4] = row(99.0, 9.0, overrun_s=4.0)
    assert "second" not in compared(rows)


def test_a_growing_file_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "rows"
    assert new_lines(path, 0) == ([], 0)
    path.write_text("a\nb\nhal")
    assert new_lines(path, 0) == (["a", "b"], 4)
    path.write_text("a\nb\nhalf\n")
    assert new_lines(path, 4) == (["half"], 9) and new_lines(path, 9) == ([], 9)


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


def test_calls_for_what_arrives_are_counted_apart_and_a_disturbed_step_is_left_out():
    quiet, disturbed = {"train": 2, "change claim train": 1, "get": 3, "lost": 1}, {"train": 9, "get": 1}
    records = [{"calls": calls} for calls in (quiet, {"train": 99}, quiet, disturbed, disturbed)]
    assert calls_of_a_step(records) == {"calls": 3, "polled": 4}


def test_a_target_is_checked_where_it_was_measured():
    lines = misses({"decode": {"decode_us_at_64": 1001.0, "intercept_us": 7.0}, "memory": {"memory_growth": 0.02}})
    assert [line.split()[:2] for line in lines] == [["MISSED", "decode_us_at_64:"], ["ok", "memory_growth:"]]


def test_every_response_of_a_group_is_replayed_in_every_order(monkeypatch):
    draw = random.Random(0)
    said = [[draw.randrange(9) for _ in range(30)] for _ in range(20)]
    monkeypatch.setattr(drafts_sides, "_groups", [drafts_sides.Said(said, said[:3], [True, False, True])])
    replay, tokens = drafts_sides._replay, []
    monkeypatch.setattr(drafts_sides, "_replay", lambda *args: tokens.append(replay(*args)) or tokens[-1])
    found = drafts_sides.text(SimpleNamespace())
    modes = {"none", "siblings", "probe", "four", "history", "history_by_reward", "both", "both_tree"}
    assert found.keys() == modes and {*map(len, said)} == {30}
    assert [count for _, count, _, _ in tokens] == [20 * 30] * len(modes)
    assert all(figures.keys() == {"tokens_per_forward", "accepted", "hit_rate"} for figures in found.values())


def test_a_mode_of_the_rhyme_ablation_is_compared_by_seed_and_with_what_is_published():
    found = rollout_rhyme.compared([100.0, 200.0], [150.0, 200.0], published=1.0)
    assert found["ratio"] == 1.25 and found["tokens_per_s"] == 175.0
    assert found["deviation"] == 0.25 and found["spread"] == pytest.approx(0.5**1.5)
    assert "deviation" not in rollout_rhyme.compared([100.0], [150.0], published=None)
    assert RHYME.published.keys() < rollout_rhyme.MODES.keys()
    figures = {"full": {"ratio": 2.0}, "histospec": {"ratio": 2.0}}
    assert rollout_rhyme.misses(figures) and not rollout_rhyme.misses(figures | {"full": {"ratio": 2.1}})


def test_engines_are_compared_round_by_round():
    seconds = {"embedded": [2.0, 4.0, 3.0], "vllm": [2.0, 2.0, 8.0], "vllm_plain": [2.0, 1.0, 4.0]}
    figures = backends_engines.summary(seconds | {"vllm_alone": [1.0, 1.5, 8.0]})
    tokens = backends_engines.REQUESTS * backends_engines.TOKENS
    assert figures["embedded"] == {"gen_tokens_per_s": tokens / 3}
    assert figures["vllm_plain"]["ratio"] == 0.5 and figures["vllm_alone"]["ratio"] == 0.75
