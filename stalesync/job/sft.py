"""Fine-tune a model on chats by supervised learning, on one card: what the assistant says is trained, the rest is read.

    file ─► chats ─ ChatTokenizer ─► tokens, mask ─► batches ─ train_supervised ─► Hugging Face folder

Teaches a model the format of a tool before its calls are rewarded. A share of the chats is held out; how well they are
predicted is reported, and may end the training.

    rendered up to the assistant's turn │ its text and its end │ others' turns │ …      tokenised apart, as they are
    not trained                         │ trained              │ not trained          when a conversation is sampled

Invariant: the parts are the whole rendered chat, up to the end of the assistant's last turn."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusion.model import Mesh, ModelConfig, Transformer, load_weights, save_folder
from fusion.model.folder import check_folder
from fusion.npu import Device
from fusion.telemetry import progress
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.job.tokenizer_folder import load_tokenizer
from stalesync.prompts import DataConfig
from stalesync.prompts.chats import normalize_chat, without_nulls
from stalesync.prompts.files import open_rows
from stalesync.prompts.json_rows import JsonRows
from stalesync.prompts.template import Chat, ChatTemplate


class Supervised(NamedTuple):
    """Tokens of a chat, and whether each is trained."""

    ids: list[int]
    trained: list[bool]


class ChatTokenizer:
    """Tokenise chats by the ``template`` of ``tokenizer``; raise ValueError if it does not show where the assistant's
    turn ends."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        if not template.applies:
            raise ValueError("the tokenizer has no chat template")
        if template.turn_end is None:
            raise ValueError("the tokenizer's chat template ends the assistant's turn with no special token")
        self._template: ChatTemplate = template
        self._tokenizer: Any = tokenizer
        self._end: str = tokenizer.convert_ids_to_tokens(template.turn_end)

    def __call__(self, chat: Chat, tools: Sequence[Mapping[str, Any]] = ()) -> Supervised:
        """Return the tokens of a chat with JSON schemas of ``tools``, up to the end of the assistant's last turn. Raise
        ValueError if the template rewrites earlier turns when later ones follow (named), leaves out tools or their
        calls, or refuses the chat."""
        whole, at = self._template.render_chat(chat, tools=tools, add_generation_prompt=False), 0
        if tools and whole == self._template.render_chat(chat, add_generation_prompt=False):
            raise ValueError("the chat template leaves out tools; write them in a message of the system")
        ids: list[int] = []
        trained: list[bool] = []
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            asked = self._template.render_chat(chat[:number], tools=tools)
            said = self._template.render_chat(chat[: number + 1], tools=tools, add_generation_prompt=False)
            end = said.find(self._end, len(asked)) + len(self._end)
            if end < len(asked) + len(self._end) or not said.startswith(asked) or not whole.startswith(said[:end]):
                raise ValueError(f"message {number}: the chat template renders it in another way when others follow")
            text = whole[len(asked) : end]
            if message.get("tool_calls") and text.strip() == f"{message['content']}{self._end}".strip():
                raise ValueError(f"message {number}: the chat template leaves out tool_calls; write them in content")
            for part, is_trained in ((whole[at : len(asked)], False), (text, True)):
                tokens = self._tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += tokens
                trained += [is_trained] * len(tokens)
            at = end
        return Supervised(ids, trained)


HELD_OUT = 64
"""Maximum number of chats that are held out; at most a tenth of the file"""
CHECK_EVERY = 10
"""Number of steps between two looks at them"""


@dataclass(frozen=True)
class FineTuning:
    """Settings of a fine-tuning. ``epochs``: passes over the chats; ``batch``: chats of an optimizer step; ``target``:
    mean probability of what the assistant says in a held-out chat at which it stops; ``max_length``: tokens of a
    chat; ``messages``: field of a row with its messages; ``seed``: of the order of the chats."""

    epochs: int = 1
    batch: int = 32
    lr: float = 1e-5
    target: float = 1.0
    max_length: int = 4096
    messages: str = "messages"
    dtype: str = "float32"
    seed: int = 0

    def validate(self) -> None:
        """Raise ValueError, by name, for a setting that has another value than it can have."""
        for name in ("epochs", "batch", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number of at least 1")
        if not self.target > 0:
            raise ValueError(f"target={self.target}: expected a number above 0")
        TrainingConfig(lr=self.lr).validate()


def fine_tune(
    chats: str | Path, model: str | Path, folder: str | Path, device: Device, plan: FineTuning = FineTuning()
) -> float:
    """Fine-tune the model of a Hugging Face folder on the chats of a JSON, JSON Lines or Parquet file; save it with its
    tokenizer in another folder. Return the mean probability of what the assistant says in a held-out chat: the share of
    them that it would sample to the token. Raise ValueError if ``folder`` is a file, a setting of ``plan`` has a wrong
    value, model or tokenizer cannot be used, the template ends no turn of the assistant, or a chat (named) is not one,
    has no message of the assistant, or is too long; RuntimeError if the model then computes no finite numbers."""
    plan.validate()
    if Path(folder).is_file():
        raise ValueError(f"{folder} is a file: expected a folder for the checkpoint")
    config = ModelConfig.from_hf(model)
    check_folder(model, config)
    tokenizer = load_tokenizer(str(model), config)
    examples = read_chats(chats, ChatTokenizer(ChatTemplate(DataConfig(), tokenizer), tokenizer), plan)
    order = random.Random(f"{plan.seed}-sft")
    order.shuffle(examples)
    num_held_out = max(1, min(HELD_OUT, len(examples) // 10))
    held_out, examples = pack_chats(examples[:num_held_out]), examples[num_held_out:]
    if not examples:
        raise ValueError(f"{chats}: expected at least 2 chats, one of which is held out")
    net = Transformer(config.without_predictors, Mesh.single(), device, getattr(torch, plan.dtype))
    load_weights(net, model)
    steps = plan.epochs * -(-len(examples) // plan.batch)
    trainer = EmbeddedTrainEngine(net, net.mesh, device=device, config=TrainingConfig(lr=plan.lr), total_steps=steps)

    def batches() -> Iterator[Sequences]:
        for _ in range(plan.epochs):
            order.shuffle(examples)
            for start in range(0, len(examples), plan.batch):
                yield pack_chats(examples[start : start + plan.batch])

    train_supervised(
        trainer,
        batches(),
        lambda step: mean_probability(trainer, held_out),
        title=f"fine-tuning on {chats}",
        steps=steps,
        target=plan.target,
        check_every=CHECK_EVERY,
    )
    probability = mean_probability(trainer, held_out)
    if not isfinite(probability):
        raise RuntimeError(f"{chats}: the trained model computes {probability}; decrease lr={plan.lr:g}")
    save_folder(net, folder, tokenizer_from=model)
    return probability


def train_supervised(
    trainer: EmbeddedTrainEngine,
    batches: Iterable[Sequences],
    check: Callable[[int], float],
    *,
    title: str,
    steps: int,
    target: float,
    check_every: int,
) -> float:
    """Train on batches by cross-entropy until the accuracy, which ``check`` returns after every ``check_every`` steps
    (its argument), has reached ``target``; return the last one. ``steps``: number of batches. Raise RuntimeError if a
    gradient is not finite."""
    accuracy = 0.0
    with progress(title, total=steps, unit="steps") as bar:
        for step, batch in enumerate(batches, 1):
            metrics = trainer.forward_backward(batch, cross_entropy)
            if trainer.optimizer_step()[SKIPPED_IN_A_ROW]:
                raise RuntimeError(f"{title}: the gradient of step {step} is not finite")
            if is_checked := step % check_every == 0:
                accuracy = check(step)
            bar.advance(loss=metrics["actor/loss"], accuracy=accuracy)
            if is_checked and accuracy >= target:
                break
    return accuracy


def read_chats(path: str | Path, tokenize: ChatTokenizer, plan: FineTuning) -> list[Supervised]:
    """Read the chats of a file; raise ValueError, with the row (counted from 0), for one that cannot be used."""
    if not Path(path).stat().st_size:
        raise ValueError(f"{path}: the file is empty")
    try:
        rows = open_rows(Path(path))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    examples = []
    for index in range(len(rows)):
        try:
            fields = rows[index] if isinstance(rows, JsonRows) else without_nulls(rows[index])
            if not isinstance(messages := fields.get(plan.messages), list):
                has = ", ".join(fields) or "none"
                raise ValueError(f"expected a list of messages in the field {plan.messages!r}; its fields: {has}")
            example = tokenize(normalize_chat(messages, answered=True), tools_of(fields))
            if len(example.ids) > plan.max_length:
                raise ValueError(f"{len(example.ids)} tokens; expected at most {plan.max_length}")
        except ValueError as error:
            raise ValueError(f"{path} row {index} (counted from 0): {error}") from None
        examples.append(example)
    return examples


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas in the field `tools` of a row, a list or its JSON; raise ValueError if it has others."""
    tools = fields.get("tools") or []
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools={tools!r:.60}: expected a list of JSON schemas")
    return tools


def pack_chats(examples: Sequence[Supervised]) -> Sequences:
    """Pack tokenised chats as a batch whose loss is on what the assistant says."""
    tokens = torch.tensor([id for example in examples for id in example.ids], dtype=torch.int64)
    mask = torch.tensor([trained for example in examples for trained in example.trained])
    return Sequences(tokens, [len(example.ids) for example in examples], mask)


def mean_probability(trainer: EmbeddedTrainEngine, batch: Sequences) -> float:
    """Return the mean over chats of the probability of all their trained tokens together."""
    logprobs = trainer.logprobs(batch)[0].split(batch.lengths)
    return sum(float(chat_logprobs.sum().exp()) for chat_logprobs in logprobs) / len(batch.lengths)
