"""Check the cards of this machine and write a report to send back.

    python scripts/smoke.py                       Ascend cards (device=npu), all of them
    python scripts/smoke.py --device cuda         NVIDIA cards
    python scripts/smoke.py --device emulated     without a card: what CI runs

Stages: doctor (what is installed), device (open, allocate, compute, release; HBM counted), hccl (collectives between
the cards; NCCL on NVIDIA), switch (weights from training to generation and back: checksums, peak against the bound),
model (operators with 128 and more experts, log-probabilities of trainer and engine, repeated steps bit by bit), train
(ten steps of a small model). All in bfloat16, with head size 128 and 128 experts. A stage that fails or cannot run does
not stop the next one. Exits with 0 if all stages are ok, with 1 otherwise.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from fusion.resources import parser_of


def main(arguments: list[str] | None = None) -> int:
    from stalesync.smoke.stages import NAMES

    parser = parser_of(__doc__)
    parser.add_argument("--device", default="npu", choices=["npu", "emulated", "cuda"])
    parser.add_argument("--cards", type=int, help="use the first N cards (default: all; emulated: 4)")
    parser.add_argument("--stages", default=",".join(NAMES), help="comma-separated (default: all)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each command of a stage (default: 600)")
    parser.add_argument("--report", type=Path, help="file of the report (default: ascend_smoke.json, cuda_smoke.json)")
    options = parser.parse_args(arguments)
    options.report = options.report or Path("cuda_smoke.json" if options.device == "cuda" else "ascend_smoke.json")
    names = options.stages.split(",")
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"--stages: unknown {', '.join(unknown)}; expected some of {', '.join(NAMES)}")
    if options.cards is not None and options.cards < 1:
        parser.error(f"--cards {options.cards}: expected at least 1")
    return run(options, names)


def run(options: argparse.Namespace, names: list[str]) -> int:
    from stalesync.process.card_environment import card_environment, card_files, describe, exported_here
    from stalesync.smoke.prerequisites import describe_machine, missing_for
    from stalesync.smoke.report import SmokeReport, lines_of
    from stalesync.smoke.stages import Stages

    cards = options.cards or (4 if options.device == "emulated" else None)
    missing = missing_for(options.device)
    if variables := card_environment(options.device, cards=cards or len(card_files()), deterministic=True):
        print(f"environment: {describe(variables, exported_here())}")
    for one in missing:
        print(one, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        stages = Stages(options.device, cards, missing, options.timeout, Path(folder))
        machine, results = describe_machine() | {"started_with": variables}, []
        for name in names:
            results.append(stages.run(name))
            print(*lines_of(results[-1], max(map(len, names))), sep="\n", flush=True)
            report = SmokeReport(options.device, machine, missing, results)
            options.report.write_text(
                report.as_json(), encoding="utf-8"
            )  # after every stage, should one crash the host
    print(f"report: {options.report}; please attach it to an issue" + ("" if report.ok else " (some stages failed)"))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
