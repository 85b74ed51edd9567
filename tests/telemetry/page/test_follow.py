import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.telemetry import RunFolder, RunReport, TimelineFile
from fusion.telemetry.page import default_path, follow, write_page
from fusion.telemetry.page.run_data import read_run
from tests.machine import run
from tests.telemetry.page.runs import leave_a_run

ROOT = Path(__file__).resolve().parents[3]


def test_a_followed_run_is_written_until_it_ends(tmp_path):
    folder, pages, slept = RunFolder(tmp_path, "run"), [], []

    def sleep(seconds):
        slept.append(seconds)
        pages.append((tmp_path / "page.html").read_text())
        folder.log(len(pages), {"a": 12345.0 + len(pages)})
        if len(pages) == 3:
            folder.close()

    follow([folder.path], tmp_path / "page.html", 2.0, sleep)
    last = (tmp_path / "page.html").read_text()
    assert len(pages) == 3 and min(slept) >= 2.0
    assert all('"refresh_s":2.0' in page for page in pages) and '"refresh_s":null' in last
    assert "12348" in last and "12347" in pages[2] and "12347" not in pages[1]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [leave_a_run(tmp_path / parent, steps=2) for parent in ("a", "b")]
    path = write_page(folders)
    assert path == folders[0] / "report-run-run.html" == default_path(folders)
    assert f"{folders[0]}, {folders[1]} – report" in path.read_text()


def test_the_page_of_runs_with_long_names_of_several_bytes_a_character_can_be_written(tmp_path):
    folders = [leave_a_run(tmp_path, "报告" * 20 + str(number), steps=2) for number in range(2)]
    assert write_page(folders).is_file()


def test_the_command_writes_the_page_and_prints_the_text(tmp_path):
    one, other = leave_a_run(tmp_path, "one", steps=3), leave_a_run(tmp_path, "other", steps=3)
    script = str(ROOT / "scripts/report.py")
    done = run([sys.executable, script, str(one)], 60, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "finished: 3 steps" in done.stdout
    assert done.stdout.endswith(f"report: {one / 'report.html'}\n") and (one / "report.html").is_file()
    out = tmp_path / "both.html"
    command = [sys.executable, script, str(one), str(other), "--out", str(out), "--follow"]
    done = run(command, 60, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "other" in out.read_text(), "no run is in progress: written once"


def test_a_folder_without_a_run_and_damage_are_errors(tmp_path):
    script = str(ROOT / "scripts/report.py")
    missing = run([sys.executable, script, str(tmp_path)], 60, stderr=subprocess.PIPE, text=True)
    assert missing.returncode == 2 and "expected the folder of a run" in missing.stderr
    folder = leave_a_run(tmp_path, steps=2)
    (folder / "metrics.jsonl").write_text("{\n{}\n")
    damaged = run([sys.executable, script, str(folder)], 60, stderr=subprocess.PIPE, text=True)
    assert damaged.returncode == 1 and "metrics.jsonl, line 1" in damaged.stderr


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("metrics.jsonl", "{}\n[1]\n", "line 2: expected one JSON object, not list"),
        ("samples.jsonl", "7\n", "line 1: expected one JSON object, not int"),
        ("samples.jsonl", '{"prompt": "p"}\n', "line 1: expected 'step' of the type int"),
        ("evaluations.jsonl", '{"file": "a", "step": 1}\n', "line 1: expected 'samples' of the type int"),
        ("groups.jsonl", f"{'[' * 100000}\n", "line 1: expected one JSON object"),
    ],
)
def test_a_line_that_no_run_writes_is_an_error_with_file_and_line(tmp_path, name, text, where):
    folder = leave_a_run(tmp_path, steps=2)
    (folder / name).write_text(text)
    command = [sys.executable, str(ROOT / "scripts/report.py"), str(folder)]
    done = run(command, 60, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and f"{name}, {where}" in done.stderr and "Traceback" not in done.stderr


def test_metrics_that_are_no_numbers_are_left_out(tmp_path):
    folder = leave_a_run(tmp_path, steps=2)
    odd = {"step": 3, "critic/rewards/mean": "high", "timing_s/step": [], "memory/train/kv_mib": "x", "timing_s/a": {}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n")
    assert read_run(folder)["steps"] == 3
    assert RunReport.from_folder(folder).steps == 3


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nothing",
        '{"otherData": {"origin_ns": "noon"}, "traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0}], "otherData": {"origin_ns": 0}}',
        '{"otherData": {"origin_ns": 0}, "traceEvents": [7]}',
    ],
)
def test_a_timeline_of_another_program_is_named_and_the_rest_is_reported(tmp_path, text):
    folder = leave_a_run(tmp_path, steps=2)
    (folder / "timeline.json").write_text(text)
    page = read_run(folder)
    assert page["cards"] is None and page["steps"] == 2
    assert any("timeline.json: expected a timeline written by this program" in line for line in page["cautions"])
    report = RunReport.from_folder(folder)
    assert any("timeline.json: expected a timeline" in line for line in report.cautions)
    with pytest.raises(ValueError, match="timeline.json: expected a timeline written by this program"):
        TimelineFile(folder / "timeline.json")
