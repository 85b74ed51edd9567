"""Measure the report of a large run: the size of its page, the time to write it, and the time to open it.

    python benchmarks/report_page.py --steps 200 --cards 8 --json report_page.json

The run is made up: 150 metrics, 512 groups of 8 responses and 4 samples of 16,000 characters a step, and about 100
activities of every card in a step, as many as a generation stage records at most. Writing is compared with its floor,
parsing the files of the run; both in CPU seconds, so that other work on the machine does not distort them. Opening
needs Chromium and playwright (the extra `browser`) and is compared with its floor, an empty page in the same browser;
it ends when the curves on the screen are drawn.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KINDS = ("prefill", "decode", "put")
ACTIVITIES, GROUPS = 100, 512
SHOWN = """critic/rewards/mean response_length/mean actor/entropy actor/kl_loss actor/grad_norm actor/loss
perf/tokens_per_s perf/utilisation timing_s/step timing_s/gen timing_s/train timing_s/switch""".split()
"""Metrics that the page draws at once; the others when they are asked for."""
METRICS = [*SHOWN, *(f"group_{index % 12}/metric_{index}" for index in range(150 - len(SHOWN)))]
ROUNDS = 5


def make_run(root: Path, steps: int, cards: int) -> Path:
    """Write a made-up run; returns its folder."""
    from fusion.telemetry import RunFolder, Span

    noise = random.Random(0)
    with RunFolder(root, "run") as run:
        run.write_config({"run": {"name": "run", "steps": steps}, "rollout": {"max_response_length": 16384}})
        run.open_loggers({})
        for step in range(1, steps + 1):
            run.log(step, {name: noise.gauss(0, 1) for name in METRICS})
            texts = [{"prompt": "p" * 500, "response": "x y " * 4000, "reward": noise.random()} for _ in range(4)]
            run.log_samples(step, texts)
            lengths = [[int(noise.lognormvariate(7, 0.9)) for _ in range(8)] for _ in range(GROUPS)]
            tokens: dict[str, Any] = {"prompt_tokens": [100] * GROUPS, "response_tokens": lengths}
            run.log_groups(step, map(str, range(GROUPS)), "trained", lag=noise.randrange(3), tokens=tokens)
        for card in range(cards):
            now, spans = 0, []
            for index in range(steps * ACTIVITIES):
                kind = "train" if index % ACTIVITIES == 0 else KINDS[index % 3]
                end = now + noise.randrange(10**7, 10**8)
                spans.append(Span(f"card {card}", kind, kind, now, end))
                now = end
            run.log_spans(spans)
    return run.path


def parse(folder: Path) -> None:
    """Parse what the report is made of."""
    from fusion.telemetry import read_timeline
    from fusion.telemetry.files import iterate_jsonl

    for name in ("metrics", "groups", "samples"):
        for _ in iterate_jsonl(folder / f"{name}.jsonl"):
            pass
    read_timeline(folder / "timeline.json")


def seconds_to_open(path: Path, ready: str) -> float | None:
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
        for _ in range(ROUNDS):
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector(ready, state="attached")
            times.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    from fusion.telemetry.page import write_page

    with tempfile.TemporaryDirectory() as root:
        folder = make_run(Path(root), args.steps, args.cards)
        run_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        start = time.process_time()
        parse(folder)
        parsed = time.process_time()
        page = write_page([folder])
        written = time.process_time()
        empty = Path(root) / "empty.html"
        empty.write_text("<!doctype html><title>empty</title><body>")
        figures = {
            "run_mb": run_bytes / 1e6,
            "page_mb": page.stat().st_size / 1e6,
            "write_s": written - parsed,
            "parse_s": parsed - start,
            "open_s": seconds_to_open(page, ".u-over"),
            "open_empty_s": seconds_to_open(empty, "body"),
        }
    print(f"{args.steps} steps, {args.cards} cards, files of {figures['run_mb']:.0f} MB")
    print(
        f"page {figures['page_mb']:.2f} MB, written in {figures['write_s']:.1f} CPU s (floor: {figures['parse_s']:.1f})"
    )
    if figures["open_s"] is None:
        print("not opened: no chromium, or no playwright")
    else:
        print(f"opened in {figures['open_s']:.2f} s (floor: {figures['open_empty_s']:.2f} s)")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
