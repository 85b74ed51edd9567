import io
import json
import re

import pytest
from rich.console import Console

from fusion.telemetry import Answer, RunFolder, RunReport, compare, report_run
from fusion.telemetry.evaluations import changes_of
from fusion.telemetry.page.run_data import read_run


def leave_a_run(root) -> RunFolder:
    with RunFolder(root, "run") as run:
        run.write_config({"run": {"steps": 20}})
        for step in range(1, 21):
            timing = {"timing_s/gen": 1.0, "timing_s/train": 3.0, "timing_s/step": 4.5}
            run.log(step, {"critic/rewards/mean": step / 20, **timing})
            samples = [{"prompt": f"{i}+1=", "response": "9" if step == 1 else str(i + 1)} for i in range(4)]
            run.log_samples(step, [sample | {"reward": float(step > 1)} for sample in samples])
    return run


def test_a_damaged_row_is_a_note_of_the_report_and_hides_no_error(tmp_path, capsys):
    run = leave_a_run(tmp_path)
    with (run.path / "groups.jsonl").open("w") as file:
        file.write('{"step": 1, "group"; "g1"}\n')
    report_run(run.path, outcome="failed", notes=["3 rows"])
    lines = capsys.readouterr().out.splitlines()
    damaged = f"{run.path}/groups.jsonl, line 1: expected one JSON object: Expecting ':' delimiter: line 1 column 20"
    assert lines[0] == "failed" and "  3 rows" in lines and f"  {run.path}/" in lines
    assert f"  report.html could not be written: {damaged} (char 19)" in lines


def test_the_report_tells_what_the_folder_holds(tmp_path):
    run = leave_a_run(tmp_path)
    given = {"next_steps": ["bash recipes/other.sh"], "notes": ["2 rewards failed"]}
    report = RunReport.from_folder(run.path, **given)
    text = report.text()
    assert text.splitlines()[0] == "finished: 20 steps in 1m30s, reward 0.075 → 0.975 (means of 2 steps)"
    assert len(report.answers) == 3
    for expected in (
        f"{run.path}/",
        "metrics.jsonl     20 steps",
        "0+1=     9  [0]   1  [1]",
        "bash recipes/other.sh",
        "2 rewards failed",
    ):
        assert expected in text, f"{expected!r} not in\n{text}"


def test_the_cautions_of_the_page_are_on_the_terminal_too(tmp_path):
    run = leave_a_run(tmp_path)
    with run:
        run.log(21, {"critic/rewards/std": 0.0, "reward/failed": 2.0})
        run.log_groups(21, ["g"], "failed:timeout")
    found = read_run(run.path)["cautions"]
    lines = RunReport.from_folder(run.path).text().splitlines()
    assert len(found) >= 3 and lines[1 : 1 + len(found)] == [f"! {line}" for line in found]


def test_an_evaluation_alone_does_not_speak_of_steps():
    report = RunReport(evaluated="step 40 of runs/a", reward_start=1.0, reward_end=1.0)
    assert report.text() == "finished: evaluated step 40 of runs/a\n"


def test_the_page_of_an_evaluation_alone_does_not_speak_of_steps_either(tmp_path):
    run = leave_a_run(tmp_path).path
    for fields, expected in (({"evaluated": "runs/one"}, None), ({}, 20)):
        report_run(run, outcome="finished", **fields)
        data = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)[1]
        assert json.loads(data)["runs"][0]["total_steps"] == expected
    (run / "evaluation.json").write_text("{}")
    assert read_run(run)["total_steps"] is None and read_run(run)["outcome"] == "finished"


def test_an_empty_run_is_reported_too(tmp_path):
    report = RunReport.from_folder(RunFolder(tmp_path, "run").path, outcome="stopped by Ctrl-C before the first step")
    assert report.text().splitlines()[0] == "stopped by Ctrl-C before the first step: 0 steps"
    assert RunReport().text() == "finished: 0 steps\n"


def test_the_first_and_the_last_evaluation_of_each_file_are_shown(tmp_path):
    def row(step, file, value, **others):
        statistics = {"reward/mean@4": value, "reward/pass@4": value / 2, "response_length/mean@4": 100 * value}
        ends = {"low": None, "high": None}
        found = {
            name: {"value": number, **(ends if step == 0 else {"low": number - 0.1, "high": number + 0.1})}
            for name, number in statistics.items()
        }
        return {"step": step, "file": file, "prompts": 30, "samples": 4, "failed": 0, "estimates": found, **others}

    with RunFolder(tmp_path, "run") as run:
        for step in (0, 10, 20):
            run.log_evaluation(step, [row(step, "aime", 0.25 + step / 100), row(step, "gsm", 0.5)], {})
        run.log_evaluation(20, [row(20, "new", 0.5, failed=120, estimates={})], {})
    lines = RunReport.from_folder(run.path).text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("evaluation "))
    assert [line.split() for line in lines[start + 2 : start + 7]] == [
        "aime 0 30 x 4 0 0.250 0.125 25.0".split(),
        "aime 20 30 x 4 0 0.450 [0.350, 0.550] 0.225 [0.125, 0.325] 45.0".split(),
        "gsm 0 30 x 4 0 0.500 0.250 50.0".split(),
        "gsm 20 30 x 4 0 0.500 [0.400, 0.600] 0.250 [0.150, 0.350] 50.0".split(),
        "new 20 30 x 4 120".split(),
    ]


def evaluated(step, right, file="held_out", **changes):
    """A row of evaluations.jsonl of as many prompts as there are characters in ``right``."""
    answers = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "response": f"r{step}-{n}", "reward": float(c == "1")}
        for n, c in enumerate(right)
    ]
    found = {"file": file, "step": step, "samples": 1, "prompts": len(right), "failed": 0, "estimates": {}}
    return found | {"digest": None, "right": right, "answers": answers} | changes


def test_the_story_is_told_by_counts_and_examples_with_reference_answers(tmp_path):
    before, after = "0" * 50 + "1" * 12 + "--", "1" * 46 + "0" * 4 + "1" * 10 + "001-"
    rows = [evaluated(0, before), evaluated(0, "00", "other"), evaluated(5, "1" * 64), evaluated(9, after)]
    changes = changes_of(rows)
    assert changes.describe() == "held_out: wrong → right 46, right → wrong 2"
    assert [one.prompt for one in changes.answers] == ["0+1=", "1+1=", "2+1=", "60+1=", "61+1="]
    assert changes.answers[3] == Answer("60+1=", "r0-60", "r9-60", 1.0, 0.0, "61")
    with RunFolder(tmp_path, "run") as run:
        run.log_evaluation(0, rows, {})
    text = RunReport.from_folder(run.path).text()
    assert "held_out: wrong → right 46, right → wrong 2" in text and "prompt   answer   before" in text
    assert "60+1=    61       r0-60  [1]   r9-60  [0]" in text
    told = read_run(run.path)["changes"]
    assert told["text"] == changes.describe() and told["answers"][3]["answer"] == "61" and len(told["answers"]) == 5


@pytest.mark.parametrize(
    "rows",
    [[], [evaluated(0, "01")], [evaluated(0, "01"), evaluated(1, "011")], [evaluated(0, ""), evaluated(1, "")]]
    + [[evaluated(0, "01"), evaluated(1, "01", digest="b")]],
)
def test_there_is_no_story_without_two_evaluations_of_the_same_prompts(rows):
    assert changes_of(rows) is None


def test_damaged_answers_end_the_examples_and_not_the_report():
    rows = [evaluated(0, "000", answers=[{"prompt": "p", "response": "r"}, 7]), evaluated(1, "111")]
    assert changes_of(rows).improved == 3 and len(changes_of(rows).answers) == 1


def test_only_answers_to_the_same_prompt_are_compared():
    before = [{"prompt": p, "response": "old", "reward": 0.0} for p in "abcde"]
    after = [{"prompt": p, "response": "new", "reward": 1.0} for p in "zecdb"]
    assert compare(before, after, count=2) == [Answer("b", "old", "new", 0.0, 1.0), Answer("c", "old", "new", 0.0, 1.0)]
    assert compare(before, []) == []


def test_markup_in_answers_is_shown_as_it_is_and_long_ones_keep_their_end():
    report = RunReport(answers=[Answer("[bold]1+1[/bold]", "x" * 500 + " so 3", "[/red] 2", 0.0, 1.0)])
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    report.show(console)
    text = report.text(width=400)
    assert "[bold]1+1[/bold]" in text and "[/red] 2  [1]" in text and "xx so 3  [0]" in text and "…" in text
    assert "[/red]" in console.file.getvalue()


def test_a_response_cannot_command_the_terminal():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    RunReport(answers=[Answer("\x1b]0;title\x07", "\x1b[2J\x9b2J", "\x00é\u200d", 0.0, 1.0)]).show(console)
    text = console.file.getvalue()
    assert "\ufffd]0;title\ufffd" in text and "é\u200d" in text and not {*"\x1b\x9b\x07\x00"} & {*text}


def test_without_a_terminal_paths_are_not_cut(tmp_path):
    line = f"  hf/ {'long' * 40}"
    console = Console(file=io.StringIO(), width=80)
    RunReport(folder=[line]).show(console)
    assert line.strip() in console.file.getvalue()
