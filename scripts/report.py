"""Report on runs, also on one that was killed or continues: as text here, and as one HTML file.

python scripts/report.py runs/quickstart                  writes runs/quickstart/report.html
python scripts/report.py runs/one runs/two                two runs side by side: runs/one/report-one-two.html
python scripts/report.py runs/quickstart --follow         writes it again and again during the run; the page
                                                          reloads itself

The file needs neither a server nor a network. It contains samples and the config of the runs.
"""

from pathlib import Path

from fusion.resources import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="folder of a run, with its config.yaml")
    parser.add_argument("--out", type=Path, help="HTML file to write instead of one in the (first) run's folder")
    parser.add_argument("--follow", action="store_true", help="until the runs have ended; prints no text report")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="interval of --follow; default 10")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not (folder / "config.yaml").is_file():
            parser.error(f"{folder}: expected the folder of a run, with its config.yaml")
    if not 1 <= arguments.every <= 86_400:
        parser.error(f"--every={arguments.every}: expected seconds in [1, 86400]")
    from fusion.telemetry import RunReport
    from fusion.telemetry.page import default_path, follow, write_page

    path = arguments.out or default_path(arguments.folders)
    try:
        if arguments.follow:
            print(f"writing {path} every {arguments.every:g} s until the runs have ended", flush=True)
            follow(arguments.folders, path, arguments.every)
        else:
            write_page(arguments.folders, path)
            for folder in arguments.folders:
                RunReport.from_folder(folder).show()
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")
    except OSError as error:
        parser.exit(1, f"error: {path}: {error.strerror}\n")
    except KeyboardInterrupt:
        parser.exit(130)
    print(f"report: {path}")


if __name__ == "__main__":
    main()
