"""Report on a run that has ended: its page and its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.telemetry.files import write_atomic
from fusion.telemetry.report import RunReport
from fusion.telemetry.run_contents import describe


def report_run(folder: Path, **fields: Any) -> None:
    """Write `report.html` and print the report. A page that cannot be written, on a full disk for example, is a note of
    the report, and so is a damaged file, without whose figures the report then is: the run has its result or its error.

    Args:
        fields: of `RunReport`, beside what the folder holds.
    """
    from fusion.telemetry.page import default_path, read_run, render

    report = RunReport(**({"steps": None} | fields))
    try:
        run = read_run(folder, fields.get("outcome"))
        report = RunReport.from_folder(folder, run, **fields)
        write_atomic(default_path([folder]), render([run]))
    except (OSError, ValueError) as error:
        report.notes = [*report.notes, f"report.html could not be written: {error}"]
    report.folder = describe(folder)
    report.show()
