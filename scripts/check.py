"""Check a job before it starts, in seconds and without Ray: data, answers, reward, memory, what its settings mean.

python scripts/check.py model.path=FOLDER data.source=FILE.jsonl reward=math cluster.npus=4

    KEY=VALUE, GROUP=CHOICE   as for scripts/train.py

Prints how a prompt ends as the model reads it, what ends a response, the lengths of prompts and which rows are
dropped, the reward of one reference answer, the memory of a card in each phase, and what a step consists of. Where the
reward is math or arithmetic, up to 1,000 reference answers are scored against themselves. Warnings come last. Exits
with 2 if the job would be refused.
"""

import sys

from fusion.resources import RECIPES, as_called, outlive_readers

USAGE = as_called("usage: python scripts/check.py [--help] [GROUP=CHOICE ...] [KEY=VALUE ...]")


def main() -> None:
    outlive_readers()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, as_called(__doc__.rstrip()), sep="\n\n")
        return
    from stalesync.command_line import refuse
    from stalesync.job.overrides import accepted, composed

    conf = RECIPES / "conf"
    try:
        config = composed(conf, accepted(sys.argv[1:], conf))
        config.validate()
        from stalesync.check import check

        warnings = check(config)
    except ValueError as error:
        refuse(USAGE, error)
    print(*(f"warning: {line}" for line in warnings), f"the job can start; {len(warnings)} warnings", sep="\n")


if __name__ == "__main__":
    main()
