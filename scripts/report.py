"""Prints the report of a run folder, also of a run that was killed: python scripts/report.py runs/quickstart"""

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a run, with its config.yaml")
    folder = parser.parse_args().folder
    if not (folder / "config.yaml").is_file():
        parser.error(f"{folder}: expected the folder of a run, with its config.yaml")
    from fusion.telemetry import RunReport

    RunReport.from_folder(folder, outcome="found").show()


if __name__ == "__main__":
    main()
