"""Changes how a run generates while it goes on, from its next step on:

    python scripts/control.py runs/NAME engines=0,2 rollout.kv_fraction=0.5 rollout.max_seqs=64

engines: numbers of the engines that generate, or all; rollout.kv_fraction, rollout.max_kv_tokens, rollout.max_seqs: as
in the config. The run says what became of the request and records it in runs/NAME/control.jsonl. Without changes:
prints the engines, their cards, and what is in force.
"""

import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 2 or not all("=" in argument for argument in sys.argv[2:]):
        sys.exit(__doc__)
    from stalesync.control import Limits, present_share, submit
    from stalesync.overrides import load

    folder, wishes = Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:])
    try:
        if wishes:
            print(f"asked for: {submit(folder, wishes)}")
            return
        limits = Limits.of(load(folder / "config.yaml"))
        share = present_share(folder, limits)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for number, cards in enumerate(limits.engines):
        print(f"engine {number}: cards {', '.join(map(str, cards))}{'' if number in share.engines else ' (idle)'}")
    print(f"in force: {share}")


if __name__ == "__main__":
    main()
