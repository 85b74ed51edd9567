import base64
import hashlib
import html.parser
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import read_timeline
from fusion.telemetry.files import iterate_jsonl
from fusion.telemetry.page import document, read_run
from fusion.telemetry.page.document import escaped_json, render
from tests import machine
from tests.telemetry.page.made_up_run import make_run
from tests.telemetry.page.runs import HOSTILE, leave_a_run, leave_long_samples

UPLOT = Path(document.ASSETS) / "uplot"


class Elements(html.parser.HTMLParser):
    """Collects the elements of a page as a browser finds them, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.names, self.texts, self.meta = [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        values = dict(attrs)
        if "http-equiv" in values:
            self.meta[values["http-equiv"]] = values["content"]
        if tag in ("script", "style"):
            self.texts.append((tag, values.get("type"), ""))

    def handle_data(self, data):
        if self.texts and self.cdata_elem:
            tag, kind, text = self.texts[-1]
            self.texts[-1] = tag, kind, text + data


def data_of(page: Elements):
    [text] = [text for tag, kind, text in page.texts if kind == "application/json"]
    return json.loads(text)


@given(st.recursive(st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists))
def test_escaped_json_is_the_data_and_holds_no_markup(data):
    text = escaped_json({"data": data})
    assert json.loads(text) == {"data": data} and text.isascii() and not set("<>&") & set(text)


def test_hostile_data_adds_no_element(tmp_path):
    tame = Elements(render([read_run(leave_a_run(tmp_path / "tame"))]))
    run = read_run(leave_a_run(tmp_path / "hostile", text=HOSTILE))
    hostile = Elements(render([run | {"name": HOSTILE}]))
    assert hostile.names == tame.names and hostile.names.count("script") == 2
    assert data_of(hostile)["runs"][0]["samples"]["now"][0]["response"] == f"20{HOSTILE}"
    assert HOSTILE in data_of(hostile)["runs"][0]["curves"]["metrics"].__str__().replace("\\u2028", "\u2028")


def test_the_policy_allows_exactly_the_script_and_the_style_of_the_page(tmp_path):
    page = Elements(render([read_run(leave_a_run(tmp_path))]))
    directives = dict(one.strip().split(" ", 1) for one in page.meta["Content-Security-Policy"].split(";"))
    assert directives.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert {directives[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    for tag, kind, text in page.texts:
        if kind is None:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert directives[f"{tag}-src"] == f"'sha256-{digest}'"


def test_nothing_of_the_page_names_another_file(tmp_path):
    text = render([read_run(leave_a_run(tmp_path))])
    assert not re.findall(r"<(?:link|img|iframe|script|audio|video)[^>]*\b(?:src|href)=", text)
    own = "".join((document.ASSETS / name).read_text() for name in document.SCRIPTS if not name.startswith("uplot"))
    assert not re.findall(r"https?:|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|document\.write|eval\(", own)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_script_is_free_of_syntax_errors(tmp_path):
    [script] = [text for tag, kind, text in Elements(render([])).texts if tag == "script" and kind is None]
    (tmp_path / "page.js").write_text(script)
    assert machine.run(["node", "--check", str(tmp_path / "page.js")], 20).returncode == 0


def test_several_runs_state_what_differs(tmp_path):
    runs = [read_run(leave_a_run(tmp_path, name, lr=lr)) for name, lr in (("a", 0.5), ("b", 0.25))]
    data = data_of(Elements(render(runs)))
    assert [row["key"] for row in data["differences"]] == ["training.lr", "run.name"]
    assert data_of(Elements(render(runs[:1])))["differences"] == []


def test_a_page_of_samples_of_128k_tokens_is_no_larger_than_one_of_2k(tmp_path):
    """How it looks: `test_browser.py`."""
    pages = [render([read_run(leave_long_samples(tmp_path / str(num), num))]) for num in (2_000, 131_072)]
    assert len(pages[1]) < 1.01 * len(pages[0])
    (run,) = data_of(Elements(pages[1]))["runs"]
    for sample in [one for kind in run["samples"].values() for one in kind]:
        for text in (sample["prompt"], sample["response"]):
            assert text.startswith("first word") and text.endswith("last") and "characters left out" in text


@pytest.mark.extended
def test_a_run_of_200_steps_on_8_cards_has_a_page_below_5_mb(tmp_path):
    """How long it takes to open: `test_browser.py`."""
    folder = make_run(tmp_path, 200, 8)
    began_s = time.process_time()
    assert all(sum(1 for _ in iterate_jsonl(folder / f"{name}.jsonl")) for name in ("metrics", "groups", "samples"))
    read_timeline(folder / "timeline.json")
    parsed_s = time.process_time()
    run = read_run(folder)
    page = render([run]).encode()
    write_s, parse_s = time.process_time() - parsed_s, parsed_s - began_s
    assert len(run["curves"]["metrics"]) == 150 and len(run["cards"]["strips"]) == 8
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) > 40e6
    print(f"page: {len(page) / 1e6:.2f} MB, written in {write_s:.1f} s of CPU, its files parsed in {parse_s:.1f} s")
    assert len(page) < 5e6 and write_s < 6 * parse_s


@pytest.mark.parametrize("name", sorted(json.loads((UPLOT / "SOURCE.json").read_text())["files"]))
def test_the_files_of_uplot_are_those_of_its_release(name):
    source = json.loads((UPLOT / "SOURCE.json").read_text())
    assert source["license"] == "MIT" and "MIT" in (UPLOT / "LICENSE").read_text()
    assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == source["files"][name]
    assert {path.name for path in UPLOT.iterdir()} == {*source["files"], "SOURCE.json"}
