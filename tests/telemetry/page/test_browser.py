"""The page in headless Chromium: `apt-get install chromium`, `pip install -e '.[browser]'`, `pytest -m browser`."""

import json
import re
import shutil
import time
from statistics import median

import pytest

from benchmarks.compare import write_page as write_page_of_compare
from benchmarks.paced import Workload
from fusion.telemetry import RunFolder
from fusion.telemetry.page import read_run, render, write_page
from tests.machine import Deadline, patience, within
from tests.telemetry.page.made_up_run import make_run
from tests.telemetry.page.runs import HOSTILE, leave_a_run, leave_long_samples

pytestmark = pytest.mark.browser

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if PROGRAM is None:
        pytest.skip("no chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[test,browser]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a page of runs; at the end of the test, nothing may have been logged, thrown or requested."""
    problems, contexts = [], []

    def open_(*folders, width=1200, scheme="light"):
        path = write_page(list(folders))
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(1000 * patience(20))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url == path.as_uri() or problems.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#config")
        return page

    open_.problems = problems
    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def evaluation(step, reward):
    """A row of evaluations.jsonl."""
    estimates = {"reward/mean@1": {"value": reward, "low": 0.0, "high": 1.0}}
    row = {"file": "held_out", "step": step, "samples": 1, "prompts": 4, "failed": 0, "estimates": estimates}
    return json.dumps(row) + "\n"


def chart(page, name):
    found = page.locator(f'.charts [data-metric="{name}"]').first
    found.scroll_into_view_if_needed()
    found.locator("canvas").wait_for()
    return found


def hover(chart, share):
    """Moves the pointer to a share of the width of a chart's plot; returns what the chart states there."""
    over = chart.locator(".u-over")
    box = over.bounding_box()
    over.hover(position={"x": share * (box["width"] - 1), "y": box["height"] / 2})
    return chart.locator(".readout").inner_text()


def test_hovering_a_curve_states_the_value_of_the_metric(tmp_path, open_page):
    folder = leave_a_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reward = chart(open_page(folder), "critic/rewards/mean")
    assert "last" in reward.inner_text() and reward.locator(".readout").inner_text().split()[-1] == "1"
    seen = set()
    for share in (0, 0.25, 0.5, 1):
        step, value = re.fullmatch(r"step (\d+)\s+(\S+)", hover(reward, share)).groups()
        assert float(value) == pytest.approx(rows[int(step) - 1]["critic/rewards/mean"], rel=1e-5)
        seen.add(int(step))
    assert {1, 20} < seen and len(seen) == 4


def test_smoothing_draws_another_line_and_states_the_same_values(tmp_path, open_page):
    page = open_page(leave_a_run(tmp_path))
    reward = chart(page, "critic/rewards/mean")
    before, pixels = hover(reward, 0.5), reward.locator("canvas").screenshot()
    page.locator("#smoothing").fill("0.9")
    assert page.evaluate("smoothed([1, null, 3], 0.5)") == [1, None, pytest.approx((0.25 + 1.5) / 0.75)]
    assert hover(reward, 0.5) == before and reward.locator("canvas").screenshot() != pixels
    page.locator("#axis").select_option("wall_s")
    assert "s" in hover(reward, 0.5) and "step" not in hover(reward, 0.5)


def test_runs_share_a_chart_and_their_differences_are_listed(tmp_path, open_page):
    one, other = leave_a_run(tmp_path, "one"), leave_a_run(tmp_path, "other", steps=10, lr=0.25)
    page = open_page(one, other)
    reward = chart(page, "critic/rewards/mean")
    assert hover(reward, 0).split() == ["step", "1", "0.05", "0.1"]
    assert hover(reward, 1).split() == ["step", "20", "1", "–"], "the other run has no such step"
    differ = page.locator("#config table").first.inner_text()
    assert "training.lr" in differ and "run.steps" in differ and "max_response_length" not in differ
    assert page.locator("#lengths .part").count() == 2


def test_hostile_data_is_shown_as_text_and_does_not_run(tmp_path, open_page):
    page = open_page(leave_a_run(tmp_path, text=HOSTILE))
    assert page.evaluate("typeof window.hostile") == "undefined" and page.locator("img").count() == 0
    assert "</script><script>window.hostile=1</script>" in page.locator("#samples").inner_text()
    page.locator("#filter").fill("window.hostile")
    page.locator("figure figcaption b", has_text="<script>").wait_for()
    # Even markup that got into the page would not run: its policy has no such script.
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hostile=1'}))")
    assert page.evaluate("typeof window.hostile") == "undefined"
    [refused] = open_page.problems
    assert "violates the following Content Security Policy" in refused
    open_page.problems.clear()


def test_the_strip_states_what_a_card_did_and_zooms(tmp_path, open_page):
    page = open_page(leave_a_run(tmp_path))
    strip = page.locator("#cards canvas.strips")
    strip.scroll_into_view_if_needed()
    readout = page.locator("#cards .strip-box .readout")
    whole = readout.inner_text()
    strip.hover(position={"x": 70, "y": 9})
    assert readout.inner_text().startswith("card 0: prepare, 1.00 s from 0.000 s on")
    page.locator("#cards").get_by_role("button", name="zoom in").click()
    strip.hover(position={"x": 70, "y": 27})
    assert readout.inner_text().startswith("card 1: ") and "prepare" not in readout.inner_text()
    page.locator("#cards").get_by_role("button", name="show the whole run").click()
    assert readout.inner_text() == whole


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (400, "light"), (1200, "dark")])
def test_a_narrow_or_dark_page_is_readable(tmp_path, open_page, width, scheme):
    page = open_page(leave_a_run(tmp_path, cards=8), width=width, scheme=scheme)
    for name in ("#curves", "#cards", "#memory", "#staleness", "#lengths", "#samples", "#config"):
        page.locator(name).scroll_into_view_if_needed()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
    ground, text = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    dark, light = (ground, text) if scheme == "dark" else (text, ground)
    assert max(map(int, re.findall(r"\d+", dark))) < 64 and min(map(int, re.findall(r"\d+", light))) > 190


def test_a_followed_page_reloads_itself_and_keeps_what_was_set(tmp_path, browser):
    with RunFolder(tmp_path, "run") as run:
        run.log(1, {"critic/rewards/mean": 0.5})
        path = write_page([run.path], refresh_s=0.2)
        page = browser.new_page()
        page.set_default_timeout(1000 * patience(20))
        page.goto(path.as_uri())
        page.locator("#smoothing").fill("0.6")
        run.log(2, {"critic/rewards/mean": 0.625})
    write_page([run.path], refresh_s=0.2)
    deadline = Deadline(20)
    while "0.625" not in page.locator("main").inner_text():
        assert not deadline.expired()
        page.wait_for_timeout(50)
    assert page.locator("#smoothing").input_value() == "0.6"
    page.close()


def test_typical_steps_of_several_runs_share_one_axis_and_one_legend(tmp_path, open_page):
    one, other = leave_a_run(tmp_path, "one"), leave_a_run(tmp_path, "other", steps=10, cards=3)
    page = open_page(one, other)
    section = page.locator("#typical")
    lanes = section.locator("canvas.strips")
    lanes.scroll_into_view_if_needed()
    assert lanes.count() == 1 and section.locator(".legend").count() == 1
    readout = section.locator(".readout")
    whole, box = readout.inner_text(), lanes.bounding_box()
    seen = []
    for row, name in enumerate(("one: 2 train and generate", "other: 3 train and generate")):
        for share in range(30, 90, 5):
            lanes.hover(position={"x": share / 100 * box["width"], "y": 40 * row + 20})
            seen.append(readout.inner_text())
            assert seen[-1].startswith(f"{name}: ")
    assert any("%" in text for text in seen), "a mean of several cards"
    section.get_by_role("button", name="zoom in").click()
    assert readout.inner_text() != whole
    for head in page.locator("header.run").all():
        assert re.search(r"typical step \d+\.\d\d s, bubbles \d+%", head.inner_text())


def test_the_page_of_compare_has_published_and_own_figures_over_aligned_steps_of_all_runs(tmp_path, browser):
    names = ("separate s=0", "full s=0", "hybrid s=1", "fifo s=0")
    figures = {
        name: {
            "tokens_per_s": 100.0 * (i + 1),
            "pace_overrun": 0.1 * i,
            "folder": str(leave_a_run(tmp_path, name)),
        }
        for i, name in enumerate(names)
    }
    figures |= {"drafts": {"8": {"ratio": 1.25}}, "simulated": {"separate s=0": 1000.0, "full s=0": 1500.0}}
    write_page_of_compare(figures, Workload(), tmp_path / "compare.html")
    page = browser.new_page()
    page.goto((tmp_path / "compare.html").as_uri())
    rows = {row.split("\t")[0].strip(): row for row in page.locator("#comparison tr").all_inner_texts()}
    fusion = rows["RL Fusion (full) over separate"]
    assert all(cell in fusion for cell in ("1.79 × published", "2.00 × paced", "1.50 × simulated", "input")), fusion
    assert "1.25 × measured" in rows["RhymeRL: drafts over none, generation"]
    assert "–" in rows["RhymeRL: HistoPipe, one step ahead, over synchronous"], "it was not run"
    assert "14,000 published" in rows["tokens/s, separate s=0"] and "100 paced" in rows["tokens/s, separate s=0"]
    notes = page.locator("#comparison").inner_text()
    assert "Not valid, cards overran their time by more than 3%: full s=0, hybrid s=1, fifo s=0." in notes
    assert "what fits into HBM is not modelled" in notes
    lanes = page.locator("#typical canvas.strips")
    lanes.scroll_into_view_if_needed()
    assert lanes.count() == 1 and lanes.bounding_box()["height"] == 40 * len(names) + 20
    assert page.locator("header.run", has_text="bubbles").count() == len(names)
    page.close()


def test_a_comparison_is_shown_as_text(tmp_path, open_page, browser):
    cells = [{"text": HOSTILE, "from": "paced"}]
    comparison = {"title": "Compared", "header": [HOSTILE], "rows": [cells], "notes": [HOSTILE]}
    (tmp_path / "page.html").write_text(render([read_run(leave_a_run(tmp_path))], comparison=comparison))
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("typeof window.hostile") == "undefined" and page.locator("img").count() == 0
    assert page.locator("#comparison").inner_text().count("window.hostile=1</script>") == 3
    page.close()


def test_the_headline_of_an_evaluation_alone_does_not_count_steps(tmp_path, open_page):
    folder = leave_a_run(tmp_path)
    headline = "header.run p"
    page = open_page(folder)
    assert page.locator(headline).first.inner_text().startswith("finished: 20 steps in ")
    page.close()
    (folder / "metrics.jsonl").unlink()
    (folder / "evaluation.json").write_text("{}")
    assert open_page(folder).locator(headline).first.inner_text().split(" · ")[0] == "finished"


def test_evaluations_come_first_and_every_curve_is_drawn_in_print(tmp_path, open_page):
    folder = leave_a_run(tmp_path)
    (folder / "evaluations.jsonl").write_text("".join(evaluation(step, step / 20) for step in (0, 10, 20)))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in (10, 20):
        rows[step - 1]["val-core/held_out/reward/mean@1"] = step / 20
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = open_page(folder, width=400)
    first = page.locator("#curves > .charts [data-metric]").first
    assert first.get_attribute("data-metric") == "val-core/held_out/reward/mean@1"
    assert hover(chart(page, "val-core/held_out/reward/mean@1"), 0).split() == ["step", "0", "0"], (
        "before the first step"
    )
    figures = page.locator("#curves > .charts figure")
    assert figures.count() > figures.locator("canvas").count(), "the others are drawn where they are looked at"
    page.pdf()
    assert figures.count() == figures.locator("canvas").count()


def test_samples_of_128k_tokens_show_their_start_and_their_end(tmp_path, open_page):
    texts = open_page(leave_long_samples(tmp_path)).locator("#samples pre").all_inner_texts()
    assert len(texts) == 2 * 16
    for text in texts:
        assert text.startswith("first word") and text.rstrip().endswith("last") and "characters left out" in text


def test_samples_have_their_reference_answers(tmp_path, open_page):
    text = open_page(leave_a_run(tmp_path)).locator("#samples").inner_text()
    assert "reference answer" in text and text.count("reference answer") == 16


def test_a_turn_that_was_cut_is_shown_though_it_is_no_message(tmp_path, open_page):
    asked, said = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "said"}
    with RunFolder(tmp_path, "run") as folder:
        folder.write_config({"run": {"steps": 1}})
        folder.log(1, {"critic/rewards/mean": 0.0})
        rows = [{"messages": [asked], "response": "cut"}, {"messages": [asked, said], "response": "whole"}]
        folder.log_samples(1, [{"prompt": "ask", "reward": 0.0, **row} for row in rows])
    text = open_page(folder.path).locator("#samples").inner_text()
    assert "cut" in text.replace("been cut", "") and "said" in text and "whole\n" not in text.replace("the whole", "")


def test_the_curves_of_200_steps_on_8_cards_are_drawn_within_2_seconds(tmp_path, browser):
    empty = tmp_path / "empty.html"
    empty.write_text("<!doctype html><title>empty</title><body>")
    page_of_run = write_page([make_run(tmp_path, 200, 8)])

    def seconds_to_open(path, ready):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        began_s = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector(ready, state="attached")
        took_s = time.perf_counter() - began_s
        page.close()
        return took_s

    open_s, empty_s = (
        median(seconds_to_open(*one) for _ in range(5)) for one in ((page_of_run, ".u-over"), (empty, "body"))
    )
    print(f"opened in {open_s:.2f} s, an empty page in {empty_s:.2f} s")
    assert within(open_s, 2)
