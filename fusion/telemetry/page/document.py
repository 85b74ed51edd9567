"""Build the HTML file of a report from the data of its runs and the files of `assets/`. Pure but for reading those.

Invariants:
1. Whatever the data contains, the file has the elements of the template and no others: data is escaped JSON in an
   element that browsers do not execute, or escaped text.
2. The Content-Security-Policy allows the script and the style of the file by their digests, and nothing else: no other
   script runs, and nothing is requested."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fusion.telemetry.files import plain
from fusion.telemetry.page.settings import differences
from fusion.telemetry.page.typical_step import aligned

ASSETS = Path(__file__).parent / "assets"

SCRIPTS = tuple("uplot/uPlot.iife.min.js dom.js curves.js bars.js strip.js samples.js settings.js main.js".split())
STYLES = tuple("uplot/uPlot.min.css page.css".split())

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws its figures with JavaScript, which is disabled.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(
    runs: Sequence[Mapping[str, Any]], refresh_s: float | None = None, comparison: Mapping[str, Any] | None = None
) -> str:
    """Return the HTML file of one or several runs (`read_run`), shown side by side.
    ``refresh_s``: the page reloads itself after this many seconds; None: never.
    ``comparison``: a table that precedes them: `title`, `header`, `notes`, and `rows` of cells, each a text and where
    it is from, such as `measured`; None: none."""
    data = {
        "runs": list(runs),
        "typical": aligned(runs),
        "comparison": comparison,
        "differences": differences([run["config"] for run in runs]) if len(runs) > 1 else [],
        "refresh_s": refresh_s,
    }
    script, style = _assets(SCRIPTS), _assets(STYLES)
    title = f"{', '.join(run['name'] for run in runs)} – report"
    sources = f"script-src '{digest(script)}'; style-src '{digest(style)}'"
    return TEMPLATE.format(
        policy=f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        title=html.escape(title.encode("utf-8", "replace").decode()),  # a file name need not be text
        style=style,
        data=escaped_json(data),
        script=script,
    )


def escaped_json(data: Any) -> str:
    """Return JSON that neither ends a script element nor begins a comment in one. Numbers that JSON lacks are null."""
    text = json.dumps(plain(data, "", {}), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def digest(text: str) -> str:
    """Return the source expression of an inline element's text: `sha256-…`."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _assets(names: Sequence[str]) -> str:
    return "\n" + "\n".join((ASSETS / name).read_text(encoding="utf-8").rstrip() for name in names) + "\n"
