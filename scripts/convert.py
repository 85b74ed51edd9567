"""Export a kept checkpoint of a run as a Hugging Face folder. Needs no card, and memory for 4 GiB of weights.

    python scripts/convert.py runs/NAME OUT                        the newest checkpoint
    python scripts/convert.py runs/NAME/checkpoints/step-40 OUT    that of step 40, or a copy of any name
    python scripts/convert.py runs/NAME OUT --merge                of a run that trained adapters (training.lora.rank)
                                                                   the whole model; else the adapters, for peft

The checkpoint's files are compared with its manifest first. `transformers.AutoModelForCausalLM.from_pretrained(OUT)`
loads the result.
"""

import sys
from pathlib import Path

from fusion.resources import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run, or of a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder for the model")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder with the tokenizer (default: the run's own)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="add trained adapters to their base, and export the whole model"
    )
    options = parser.parse_args()
    if not options.source.is_dir():
        parser.error(f"{options.source}: expected the folder of a run, or of a checkpoint")
    from stalesync.job.conversion import convert

    try:
        print(convert(options.source, options.out, options.tokenizer, options.merge))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
