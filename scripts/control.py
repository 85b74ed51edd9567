"""Change the generation settings of a running run from its next step on, or print the current ones.

    python scripts/control.py runs/NAME                             prints engines, cards and current settings
    python scripts/control.py runs/NAME engines=0,2 rollout.engine.kv_fraction=0.5 rollout.engine.max_seqs=64

engines=: the engines that generate, by number, or all. rollout.engine.kv_fraction=, rollout.engine.max_kv_tokens=,
rollout.engine.max_seqs=: as in the config. The run prints whether it applied the request, and records it in
runs/NAME/control.jsonl.
"""

from pathlib import Path

from fusion.resources import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="settings to change; none: print the current ones"
    )
    options, others = parser.parse_known_args()
    words = [*others, *options.changes]
    from fusion.telemetry.folder_lock import is_held
    from stalesync.job.control import Limits, present_share, submit
    from stalesync.job.overrides import check_overrides, typed_keys, typed_words

    try:
        check_overrides(words, ["engines"])
        if malformed := [word for word in words if "=" not in word]:
            raise ValueError(f"{malformed[0]!r}: expected KEY=VALUE")
        if words:
            changes = dict(word.split("=", 1) for word in typed_words(words, typed_keys()))
            print(f"requested: {submit(options.folder, changes)}")
            if not is_held(options.folder):
                print("no run of this machine has the folder: the next step of a run that has it takes the request")
            return
        limits = Limits.of_run(options.folder)
        share = present_share(options.folder, limits)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for number, cards in enumerate(limits.engines):
        print(f"engine {number}: cards {', '.join(map(str, cards))}{'' if number in share.engines else ' (idle)'}")
    print(f"current settings: {share}")


if __name__ == "__main__":
    main()
