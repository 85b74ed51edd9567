"""Tells again what a run folder holds, also of a killed run: python scripts/report.py runs/quickstart"""

import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "config.yaml").is_file():
        sys.exit("usage: python scripts/report.py RUN_FOLDER     (a folder that holds a config.yaml)")
    from fusion.telemetry import RunReport

    RunReport.from_folder(sys.argv[1], outcome="found").show()


if __name__ == "__main__":
    main()
