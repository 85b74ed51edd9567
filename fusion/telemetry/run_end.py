"""Report on a run that has ended: its page and its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.telemetry.report import RunReport


def report_run(folder: Path, **fields: Any) -> None:
    """Write `report.html` and print the report. A page that cannot be written, on a full disk for example, is a note of
    the report, and so is a damaged file, without whose figures the report then is: the run has its result or its error.

    Args:
        fields: of `RunReport`, beside what the folder holds.
    """
    from fusion.telemetry.page import write_page

    try:
        write_page([folder], outcome=fields.get("outcome"))
    except (OSError, ValueError) as error:
        fields["notes"] = [*fields.get("notes", ()), f"report.html could not be written: {error}"]
    try:
        report = RunReport.from_folder(folder, **fields)
    except (OSError, ValueError) as error:
        notes = (*fields.get("notes", ()), f"the figures could not be read: {error}")
        report = RunReport(**{"folder": [f"{folder}/"], "steps": None, **fields, "notes": notes})
    report.show()
