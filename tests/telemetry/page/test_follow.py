import subprocess
import sys
from pathlib import Path

from fusion.telemetry import RunFolder
from fusion.telemetry.page import default_path, follow, write_page
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


def test_the_command_writes_the_page_and_prints_the_text(tmp_path):
    one, other = leave_a_run(tmp_path, "one", steps=3), leave_a_run(tmp_path, "other", steps=3)
    script = str(ROOT / "scripts/report.py")
    done = run([sys.executable, script, str(one)], 60, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "found: 3 steps" in done.stdout
    assert done.stdout.endswith(f"report: {one / 'report.html'}\n") and (one / "report.html").is_file()
    out = tmp_path / "both.html"
    command = [sys.executable, script, str(one), str(other), "--out", str(out), "--follow"]
    done = run(command, 60, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "other" in out.read_text(), "no run goes on: written once"


def test_a_folder_without_a_run_and_damage_are_errors(tmp_path):
    script = str(ROOT / "scripts/report.py")
    missing = run([sys.executable, script, str(tmp_path)], 60, stderr=subprocess.PIPE, text=True)
    assert missing.returncode == 2 and "expected the folder of a run" in missing.stderr
    folder = leave_a_run(tmp_path, steps=2)
    (folder / "metrics.jsonl").write_text("{\n{}\n")
    damaged = run([sys.executable, script, str(folder)], 60, stderr=subprocess.PIPE, text=True)
    assert damaged.returncode == 1 and "metrics.jsonl, line 1" in damaged.stderr
