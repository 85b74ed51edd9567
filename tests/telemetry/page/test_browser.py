"""The page in headless Chromium: `apt-get install chromium`, `pip install -e '.[browser]'`, `pytest -m browser`."""

import json
import re
import shutil

import pytest

from fusion.telemetry import RunFolder
from fusion.telemetry.page import write_page
from tests.machine import Deadline, patience
from tests.telemetry.page.runs import HOSTILE, leave_a_run

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
    strip = page.locator("canvas.strips")
    strip.scroll_into_view_if_needed()
    readout = page.locator(".strip-box .readout")
    whole = readout.inner_text()
    strip.hover(position={"x": 70, "y": 9})
    assert readout.inner_text().startswith("card 0: prepare, 1.00 s from 0.000 s on")
    page.get_by_role("button", name="zoom in").click()
    strip.hover(position={"x": 70, "y": 27})
    assert readout.inner_text().startswith("card 1: ") and "prepare" not in readout.inner_text()
    page.get_by_role("button", name="show the whole run").click()
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
