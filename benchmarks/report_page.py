"""Measure the report of a large run: the size of its page, the time to write it, and the time to open it.

The run is made up (`tests/telemetry/page/made_up_run.py`). Writing is compared with its floor, parsing the files of the
run; both in CPU seconds, so that other work on the machine does not distort them. Opening needs Chromium and playwright
(the extra `browser`) and is compared with its floor, an empty page in the same browser; it ends when the curves on the
screen are drawn.
"""

import shutil
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Figures, Option, timed

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.report_page:measure"},
    [
        Option("steps", 200, smoke=4, help="steps of the run"),
        Option("cards", 8, smoke=2, help="cards of the run"),
        Option("rounds", 5, smoke=1, help="how often the page is opened"),
    ],
    {"page_mb": "<= 5", "open_s": "<= 2"},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

from benchmarks.runs import temporary_folder
from fusion.telemetry import read_timeline
from fusion.telemetry.files import iterate_jsonl
from fusion.telemetry.page import write_page
from tests.telemetry.page.made_up_run import make_run


def parse(folder: Path) -> None:
    """Parse what the report is made of."""
    for name in ("metrics", "groups", "samples"):
        for _ in iterate_jsonl(folder / f"{name}.jsonl"):
            pass
    read_timeline(folder / "timeline.json")


def seconds_to_open(path: Path, ready: str, rounds: int) -> float | None:
    """Return the median time in which a browser shows a file until ``ready`` is there; None without a browser."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if program is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        times = []
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector(ready, state="attached")
            times.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(times)


def measure(args: Namespace) -> Figures:
    """Write, parse and open the page of a made-up run."""
    with temporary_folder() as root:
        folder = make_run(root, args.steps, args.cards)
        run_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        parse_s = timed(lambda: parse(folder), time.process_time)
        pages: list[Path] = []
        write_s = timed(lambda: pages.append(write_page([folder])), time.process_time)
        empty = root / "empty.html"
        empty.write_text("<!doctype html><title>empty</title><body>")
        open_s = seconds_to_open(pages[0], ".u-over", args.rounds)
        if open_s is None:
            print("not opened: no chromium, or no playwright")
        return {
            "run_mb": run_bytes / 1e6,
            "page_mb": pages[0].stat().st_size / 1e6,
            "write_cpu_s": write_s,
            "parse_cpu_s": parse_s,
            "open_s": open_s,
            "open_empty_s": seconds_to_open(empty, "body", args.rounds),
        }
