"""Evaluate a model alone: answer prompts, score them, print a table and write JSON.

    python scripts/evaluate.py runs/NAME                                the run's newest checkpoint, on the run's files
    python scripts/evaluate.py runs/NAME/checkpoints/step-40 eval.samples=8
    python scripts/evaluate.py MODEL_FOLDER 'eval.files=[math500.jsonl]' reward=math cluster.npus=4 device=npu

    RUN_OR_MODEL   folder of a run, of a checkpoint, or of a Hugging Face model
    KEY=VALUE, GROUP=CHOICE
                   as for scripts/train.py. Defaults are the run's config; for a model those of scripts/train.py,
                   without held-out prompts (run.eval_prompts=0)
    --json PATH    where else to write the results, which are in evaluation.json in the folder of the evaluation;
                   - prints them, and all else to the standard error

The evaluation is the one of a run (docs/evaluation.md), on the same cards and in the same layouts. It has a folder of
its own in run.dir: evaluate-NAME, with logs and all results.
"""

from stalesync.process.stopping import ignore_stops, leave_at_stops

if __name__ == "__main__":
    leave_at_stops()  # before anything else is imported, which takes seconds

import sys  # noqa: E402

from fusion.resources import RECIPES, as_called, outlive_readers  # noqa: E402

CONF = RECIPES / "conf"
USAGE = as_called(
    "usage: python scripts/evaluate.py [--help] RUN_OR_MODEL [GROUP=CHOICE ...] [KEY=VALUE ...] [--json PATH]"
)


def main() -> None:
    outlive_readers()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, as_called(__doc__.rstrip()), sep="\n\n")
        return
    from stalesync.command_line import refuse
    from stalesync.standalone import evaluate, parse_arguments

    try:
        arguments = parse_arguments(sys.argv[1:], CONF)
    except ValueError as error:
        refuse(USAGE, error)
    evaluate(arguments, USAGE)


if __name__ == "__main__":
    try:
        main()
    finally:
        ignore_stops()
