"""Create a small base model: some hundred thousand parameters of any architecture, Qwen3-MoE's if none is given. It is
trained by supervised learning on a generator's solutions until it reaches a target accuracy, and saved as a Hugging
Face folder.

The trainer, the engine and the reward are those of the main job, in one process on one card."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fusion.inference import EmbeddedEngine, Request, RolloutConfig
from fusion.inference.config import EngineConfig
from fusion.model import Mesh, ModelConfig, Transformer, save_folder
from fusion.npu import Device
from fusion.rewards import RewardConfig, RewardPool
from fusion.telemetry.classes import find_class
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from stalesync.job.sft import ChatTokenizer, mean_probability, pack_chats, train_supervised
from stalesync.prompts import ChatTemplate, DataConfig, Prompt, PromptSource, Row, make_tokenizer, solution_ids
from stalesync.prompts.calculator import RepeatRows
from stalesync.prompts.config import GENERATORS
from stalesync.prompts.guess import WORDS
from stalesync.prompts.rows import Rows

STD = 0.08
"""Standard deviation of the initial weights; models of this width learn poorly with 0.02, transformers' default."""
_TRAINING = TrainingConfig(lr=1e-3, weight_decay=0.01, load_balancing_coef=1e-3, token_budget=1 << 16)


@dataclass(frozen=True)
class WarmUp:
    """Settings of the training of a base model. ``reward``: of a sampled answer; ``target``: their mean at which it
    stops; ``response_tokens``: maximum tokens of a sampled answer; ``max_steps``: maximum number of optimizer steps. Of
    a model for conversations: ``held_out``, the rows whose chats are to reach the target, and ``repeats``, the share of
    chats in which the model only repeats what it reads, and ``words`` that are one token each. ``fields``: of its
    `config.json`."""

    data: DataConfig
    reward: str = "arithmetic"
    hidden: int = 64
    layers: int = 2
    response_tokens: int = 5
    target: float = 0.2
    max_steps: int = 2000
    batch: int = 256
    held_out: DataConfig | None = None
    repeats: float = 0.0
    words: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    check_every: int = 5
    check_prompts: int = 256
    training: TrainingConfig = field(default_factory=lambda: _TRAINING)


NEAR_POSITIONS = {"rope_theta": 50.0}
"""With so short chats, smaller heads find a position faster when no rotation is slower than the longest of them"""

TASKS = {
    "addition": WarmUp(DataConfig(source="addition", max_prompt_length=8)),
    "worked_arithmetic": WarmUp(
        DataConfig(source="worked_arithmetic", max_prompt_length=64),
        layers=3,
        response_tokens=96,
        target=0.3,
        batch=64,
        check_every=20,
        check_prompts=128,
        training=replace(_TRAINING, lr=2e-3, warmup_steps=20),
    ),
    "counting": WarmUp(
        DataConfig(source="counting", max_digits=256),
        reward="counting",
        layers=1,
        response_tokens=256,
        target=0.4,
        batch=16,
        check_every=150,
        check_prompts=40,
        fields=NEAR_POSITIONS | {"max_position_embeddings": 1 << 14},
        training=replace(_TRAINING, lr=3e-3, warmup_steps=20),
    ),
    "calculator": WarmUp(
        DataConfig(source="calculator", min_digits=1, max_digits=2, max_terms=3),
        held_out=DataConfig(source="calculator", min_digits=4, max_digits=4),
        repeats=0.65,
        target=0.4,
        batch=64,
        max_steps=1000,
        check_every=10,
        check_prompts=64,
        fields=NEAR_POSITIONS,
        training=replace(_TRAINING, lr=3e-3, warmup_steps=20),
    ),
    "guess": WarmUp(
        DataConfig(source="guess"),
        held_out=DataConfig(source="guess"),
        words=WORDS,
        hidden=128,
        target=0.0,
        batch=64,
        max_steps=150,
        check_every=150,
        fields=NEAR_POSITIONS | {"num_attention_heads": 8, "num_key_value_heads": 8},
        training=replace(_TRAINING, lr=3e-3, warmup_steps=20),
    ),
}


def make_base_model(
    task: str,
    folder: str | Path,
    device: Device,
    seed: int = 0,
    *,
    shape: Mapping[str, Any] | None = None,
    **changes: Any,
) -> float:
    """Warm up a model on ``task``, save it with its tokenizer, and return its sampled accuracy (0 … 1). ``shape``:
    fields of its `config.json`, without those that the tokenizer determines; None: a Qwen3-MoE; ``changes``: of the
    task's `WarmUp`. Raise ValueError if ``task`` is not one of TASKS, or ``shape`` is not supported (named),
    RuntimeError if the accuracy was not reached in ``max_steps``."""
    if task not in TASKS:
        raise ValueError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    plan = replace(TASKS[task], **changes)
    fields = _qwen3_moe(plan) if shape is None else shape
    ModelConfig.from_hf({"vocab_size": 1, **fields}, "shape")  # before anything is written
    tokenizer = make_tokenizer(folder, chat=plan.held_out is not None, words=plan.words)
    model = _initial_model(fields, tokenizer, device=device, seed=seed)
    trainer = EmbeddedTrainEngine(model, model.mesh, device=device, config=plan.training)
    title = f"warm-up on {task}"
    with ExitStack() as stack:
        if plan.held_out is None:
            batches, check = _answers(stack, plan, model, tokenizer, seed=seed)
        else:
            batches, check = _chats(plan, plan.held_out, trainer, tokenizer, seed=seed)
        accuracy = train_supervised(
            trainer,
            batches,
            check,
            title=title,
            steps=plan.max_steps,
            target=plan.target,
            check_every=plan.check_every,
        )
    if accuracy < plan.target:
        raise RuntimeError(f"{title}: accuracy {accuracy:.2f} after {plan.max_steps} steps, not {plan.target}")
    save_folder(model, folder)
    return accuracy


Lesson = tuple[Iterator[Sequences], Callable[[int], float]]
"""The batches that a model is trained on, and what measures its accuracy after a number of steps"""


def _answers(stack: ExitStack, plan: WarmUp, model: Transformer, tokenizer: Any, *, seed: int) -> Lesson:
    """Return solutions of prompts, and the accuracy of sampled answers. ``stack`` ends the processes of the reward."""
    source = PromptSource(plan.data, tokenizer, seed)
    rewards = stack.enter_context(RewardPool(RewardConfig(name=plan.reward, workers=1)))

    def batches() -> Iterator[Sequences]:
        for _ in range(plan.max_steps):
            prompts = source.next(plan.batch)
            yield pack_responses([p.ids for p in prompts], [solution_ids(p, tokenizer) for p in prompts])

    def accuracy_after(step: int) -> float:
        held_out = source.evaluation(plan.check_prompts)
        return _accuracy(plan, model, tokenizer, prompts=held_out, rewards=rewards, step=step)

    return batches(), accuracy_after


def _chats(plan: WarmUp, held_out: DataConfig, trainer: EmbeddedTrainEngine, tokenizer: Any, *, seed: int) -> Lesson:
    """Return chats, and how probable those that are held out are: the share of them that would be sampled to the
    token."""
    tokenize = ChatTokenizer(ChatTemplate(DataConfig(), tokenizer), tokenizer)
    generator = find_class(plan.data.source, GENERATORS, key="data.source", base=Rows)
    rows, repeats = generator(plan.data, seed), RepeatRows(seed)
    checked = generator(held_out, seed).evaluation(plan.check_prompts)
    packed = pack_chats([tokenize(_solved(row)) for row in checked])
    num_repeats = round(plan.repeats * plan.batch)

    def batches() -> Iterator[Sequences]:
        for step in range(plan.max_steps):
            drawn = [(repeats if n < num_repeats else rows).row(step * plan.batch + n) for n in range(plan.batch)]
            yield pack_chats([tokenize(_solved(row)) for row in drawn])

    return batches(), lambda step: mean_probability(trainer, packed)


def _solved(row: Row) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row.prompt}, *row.fields["solution"]]


def pack_responses(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Sequences:
    return Sequences.from_packed(
        [len(ids) for ids in prompts],
        [len(ids) for ids in responses],
        prompts=torch.tensor([id for ids in prompts for id in ids]),
        responses=torch.tensor([id for ids in responses for id in ids]),
    )


def _qwen3_moe(plan: WarmUp) -> dict[str, Any]:
    fields = dict(
        model_type="qwen3_moe",
        hidden_size=plan.hidden,
        intermediate_size=plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=plan.hidden,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        tie_word_embeddings=True,
    )
    return {**fields, **plan.fields}


def _initial_model(fields: Mapping[str, Any], tokenizer: Any, *, device: Device, seed: int) -> Transformer:
    own = dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=max(1024, fields.get("max_position_embeddings", 0)),
        initializer_range=STD,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Transformer(ModelConfig.from_hf({**fields, **own}, "shape"), Mesh.single(), device)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * STD)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)  # weights of norms; the others are biases
    return model


def _accuracy(
    plan: WarmUp, model: Transformer, tokenizer: Any, *, prompts: list[Prompt], rewards: RewardPool, step: int
) -> float:
    """Return the mean reward of one sampled answer per prompt."""
    config = RolloutConfig(max_response_length=plan.response_tokens, engine=EngineConfig(max_seqs=plan.check_prompts))
    engine = EmbeddedEngine(model, model.mesh, device=model.device, config=config, seed=step)
    engine.allocate_kv()
    engine.submit(Request(prompt.id, prompt.ids, config.sampling_params()) for prompt in prompts)
    texts = {}
    for out in engine.run():
        has_end = out.tokens[-1:] == [tokenizer.eos_token_id]
        texts[out.request_id] = tokenizer.decode(out.tokens[:-1] if has_end else out.tokens)
    engine.release_kv()
    outcomes = rewards.score([prompt.for_reward(texts[prompt.id]) for prompt in prompts])
    return sum(outcome.reward or 0.0 for outcome in outcomes) / len(prompts)
