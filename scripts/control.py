"""Changes how a run generates while it runs, from its next step on, or prints what is in force.

    python scripts/control.py runs/NAME                                     the engines, their cards, what is in force
    python scripts/control.py runs/NAME engines=0,2 rollout.kv_fraction=0.5 rollout.max_seqs=64

engines=: the engines that generate, by number, or all. rollout.kv_fraction=, rollout.max_kv_tokens=,
rollout.max_seqs=: as in the config. The run prints whether it applied the request, and records it in
runs/NAME/control.jsonl.
"""

import argparse
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="what to change; none: print what is in force")
    given = parser.parse_args()
    if unclear := [change for change in given.changes if "=" not in change]:
        parser.error(f"{unclear[0]!r}: expected KEY=VALUE")
    from stalesync.control import Limits, present_share, submit
    from stalesync.overrides import load

    changes = dict(change.split("=", 1) for change in given.changes)
    try:
        if changes:
            print(f"requested: {submit(given.folder, changes)}")
            return
        limits = Limits.of(load(given.folder / "config.yaml"))
        share = present_share(given.folder, limits)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for number, cards in enumerate(limits.engines):
        print(f"engine {number}: cards {', '.join(map(str, cards))}{'' if number in share.engines else ' (idle)'}")
    print(f"in force: {share}")


if __name__ == "__main__":
    main()
