"""Fine-tunes a model on chats, on one card, such as to teach it the format of tool calls.

    python scripts/sft.py CHATS.jsonl MODEL_FOLDER runs/base/tools [--epochs 1] [--lr 1e-5] [--batch 32]

A row of the file is an object whose field `messages` holds a chat (docs/environments.md); also ShareGPT's form. What
the assistant says is trained, as the chat template of the model's tokenizer renders it; all else is only read. Up to 64
chats, at most a tenth, are held out: the result states how probable the assistant's turns of one are together.
The folder becomes a Hugging Face checkpoint with the tokenizer; if it already contains one, the script does nothing.
"""

from dataclasses import fields
from pathlib import Path

from fusion.resources import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("chats", type=Path, help="JSON Lines, JSON or Parquet file with a chat in each row")
    parser.add_argument("model", type=Path, help="Hugging Face folder of the model, with a chat template")
    parser.add_argument("folder", type=Path, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--messages", default="messages", help="field of a row with its messages")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the chats")
    parser.add_argument("--batch", type=int, default=32, help="chats of an optimizer step")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of AdamW")
    parser.add_argument("--target", type=float, default=1.0, help="probability of held-out chats at which it stops")
    parser.add_argument("--max-length", type=int, default=4096, help="maximum tokens of a chat")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights")
    parser.add_argument("--seed", type=int, default=0, help="seeds the order of the chats")
    parser.add_argument("--device", default="emulated", choices=("auto", "npu", "cuda", "emulated"))
    options = parser.parse_args()
    if (options.folder / "config.json").is_file():
        print(f"fine-tuned model: {options.folder} exists already")
        return

    from fusion.npu import open_device
    from stalesync.job.sft import FineTuning, fine_tune

    plan = FineTuning(**{field.name: getattr(options, field.name) for field in fields(FineTuning)})
    try:
        probability = fine_tune(options.chats, options.model, options.folder, open_device(options.device), plan)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except RuntimeError as error:  # the learning rate is too large
        parser.exit(1, f"error: {error}\n")
    print(f"fine-tuned model: {options.folder}, probability of held-out turns {probability:.0%}")


if __name__ == "__main__":
    main()
