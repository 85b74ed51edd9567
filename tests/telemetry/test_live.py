import io
import re

import pytest
from rich.console import Console

from fusion.telemetry import LiveView, MemoryLedger, progress
from fusion.telemetry.columns import columns_for, duration, header_lines

ROW = {
    "critic/rewards/mean": 0.3125,
    "response_length/mean": 3.25,
    "actor/kl_loss": 0.0012,
    "perf/tokens_per_s": 16234.4,
    "timing_s/gen": 1.234,
    "timing_s/reward": 0.05,
    "timing_s/train": 12.34,
    "timing_s/switch_to_infer": 0.25,
    "timing_s/switch_to_train": 0.5,
    "memory/infer/peak_mib": 5.0,
    "memory/train/peak_mib": 2048.0,
}

PLAIN = """\
step reward length      KL  tokens   gen reward   ref train switch infer train
                                /s     s      s     s     s      s   HBM   HBM
   1  0.312    3.2  0.0012  16,234  1.23   0.05     –  12.3   0.75 5.00M 2.00G   ETA
"""


def plain() -> Console:
    return Console(file=io.StringIO(), width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, height=30, force_terminal=True)


def test_without_a_terminal_every_step_is_one_aligned_line():
    console = plain()
    with LiveView(50, console=console) as view:
        for step in range(1, 51):
            view.update(step, ROW)
    lines = console.file.getvalue().splitlines()
    assert "\n".join(lines[:3]).startswith(PLAIN.rstrip("\n"))
    assert len(lines) == 50 + 2 * 3 and "\x1b" not in console.file.getvalue()
    assert [index for index, line in enumerate(lines) if line.startswith("step")] == [0, 22, 44]
    assert lines[-1].endswith("done") and "ETA" in lines[-2]


def test_every_figure_stands_under_its_header():
    first, second = header_lines(columns_for(ROW))
    ends = [match.end() for match in re.finditer(r"\S+", PLAIN.splitlines()[2])][:12]
    assert ends == [match.end() for match in re.finditer(r"\S+", first)]
    assert [match.end() for match in re.finditer(r"\S+", second)] == ends[4:]


def test_without_a_reference_the_kl_column_says_which_kl_it_is():
    row = {name: value for name, value in ROW.items() if name != "actor/kl_loss"} | {"actor/ppo_kl": 0.5}
    column = columns_for(row)[3]
    assert column.title == "old\nKL" and column.cell(row) == "0.5000"
    assert columns_for({})[3].cell({}) == "–"


def test_the_tokens_of_a_forward_pass_are_a_column_only_where_there_are_drafts():
    row = ROW | {"rollout/tokens_per_forward_mean": 2.345}
    assert columns_for(row) == columns_for(ROW)
    drafted = row | {"rollout/draft_mib_max": 0.1}
    (column,) = [one for one in columns_for(drafted) if one not in columns_for(row)]
    assert column.title == "tokens\n/pass" and column.cell(drafted) == "2.35"


def test_the_signal_of_a_step_comes_first_where_it_was_measured():
    signal = {
        "frac_reward_zero_std": 0.25,
        "critic/advantages/zero_share": 0.3,
        "response_length/clip_ratio": 0.05,
        "reward/failed_share": 0.01,
        "env/failed": 3.0,
        "rollout_corr/rollout_is_eff_sample_size": 0.98,
        "training/kept_mass_mean": 0.912,
    }
    columns = columns_for(ROW | signal)
    titles = [column.title.replace("\n", " ") for column in columns[2:9]]
    assert titles == ["live groups", "zero adv.", "cut", "failed", "env failed", "ESS", "kept mass"]
    assert [column.cell(ROW | signal) for column in columns[2:9]] == ["75%", "30%", "5%", "1%", "3", "98%", "0.912"]
    assert [*columns[:2], *columns[9:]] == [*columns_for(ROW)]


def test_a_long_step_is_not_silent(monkeypatch):
    monkeypatch.setattr("fusion.telemetry.live.QUIET_S", 0.0)
    console = plain()
    with LiveView(2, console=console, steps_done=1) as view:
        view.phase("generate", 3, 256)
        view.note("reward.path raised on [1] sample")
    said = console.file.getvalue().splitlines()
    assert said[0].startswith("  step 2: generate 3/256, 0.0s into the step")
    assert said[1] == "reward.path raised on [1] sample"


def test_a_resumed_run_counts_from_the_step_it_was_resumed_at(monkeypatch):
    monkeypatch.setattr("fusion.telemetry.live.QUIET_S", 0.0)
    console = plain()
    with LiveView(9, console=console, steps_done=7) as view:
        view.phase("generate")
        view.update(8, ROW)
        assert view.done == 8 and view.eta() != "done"
        view.update(9, ROW)
        assert view.eta() == "done"
    assert console.file.getvalue().startswith("  step 8: generate")
    console = terminal()
    with LiveView(9, console=console, steps_done=7):
        pass
    assert "7/9" in console.file.getvalue()


def test_progress_follows_the_number_of_the_step():
    with LiveView(9, console=plain()) as view:
        view.update(8, ROW)
        assert view.done == 8 and view.eta().startswith("ETA")


def test_on_a_terminal_the_table_and_the_bar_are_drawn_and_the_cursor_comes_back():
    console = terminal()
    with pytest.raises(KeyboardInterrupt), LiveView(3, console=console) as view:
        view.phase("generate", 1, 4)
        view.update(1, ROW)
        view.note("a note")
        with progress("saving", 2, console=console) as bar:
            bar.advance()
        raise KeyboardInterrupt
    shown = console.file.getvalue()
    for text in ("0.312", "16,234 tokens/s", "1/3", "a note", "saving", "switch"):
        assert text in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_other_long_work_says_how_far_and_how_long_still():
    console = plain()
    with progress("warm-up", 4, "steps", console=console, every_s=0) as bar:
        for _ in range(4):
            bar.advance(loss=0.125)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "warm-up: 0/4 steps" and lines[-1].startswith("warm-up: 4 steps in ")
    assert re.fullmatch(r"warm-up: 2/4 steps, [\d,.]+ steps/s, ETA 0.0s, loss 0.125", lines[2])
    console = plain()
    with pytest.raises(KeyError), progress("reading", console=console) as bar:
        bar.advance(3)
        raise KeyError
    assert console.file.getvalue().splitlines()[-1].startswith("reading: 3, stopped after ")


def test_the_ledger_fills_the_hbm_columns():
    ledger = MemoryLedger()
    ledger.record("infer", {"kv": 3}, 3 * 2**30)
    cells = {column.title: column.cell(ledger.metrics()) for column in columns_for({})}
    assert cells["infer\nHBM"] == "3.00G" and cells["train\nHBM"] == "–"


def test_durations_read_well():
    assert [duration(value) for value in (0.04, 9.96, 59.7, 200, 7500)] == ["0.0s", "10s", "1m00s", "3m20s", "2h05m"]


def test_a_phase_of_the_next_step_is_shown_as_such_and_kept_when_the_row_of_the_step_before_comes(monkeypatch):
    monkeypatch.setattr("fusion.telemetry.live.QUIET_S", 0.0)
    console = plain()
    with LiveView(3, console=console) as view:
        view.begin_step(1)
        view.phase("train")
        view.begin_step(2)
        view.phase("switch to infer")
        view.update(1, {})
        assert view._phase == "switch to infer"
        view.begin_step(3)
        view.update(2, {})
        view.phase("train")
        view.update(3, {})
        assert view._phase == ""
        view.phase("save")
    phases = [line for line in console.file.getvalue().splitlines() if " into the step" in line]
    assert [line.split(",")[0].strip() for line in phases] == [
        "step 1: train",
        "step 2: switch to infer",
        "step 3: train",
        "step 3: save",
    ]
