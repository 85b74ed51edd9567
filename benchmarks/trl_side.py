"""Run TRL's side of `benchmarks/trl.py`: the same GRPO job in its GRPOTrainer, on the plain CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "1.16.0"


def train(*, model: str, folder: str, steps: int, seed: int, task: dict[str, Any]) -> None:
    """Train ``steps`` rollout batches; append a row to ``folder``/metrics.jsonl when one is trained.

    Args:
        model: folder of the base model.
        task: as `benchmarks/trl.py` defines it.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from fusion.rewards.arithmetic import arithmetic

    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rewards: list[float] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = [arithmetic(*one) for one in zip(prompts, completions, answer, strict=True)]
        rewards.append(sum(scores) / len(scores))
        return scores

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % task["minibatches"] == 0:
                with Path(folder, "metrics.jsonl").open("a") as file:
                    print(json.dumps({"critic/rewards/mean": rewards[-1]}), file=file)

    samples = task["prompts"] * task["group_size"]
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps * task["minibatches"],
        per_device_train_batch_size=samples // task["minibatches"],
        steps_per_generation=task["minibatches"],
        gradient_accumulation_steps=1,
        num_generations=task["group_size"],
        max_completion_length=task["response_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=task["kl_coef"],
        loss_type="grpo",
        learning_rate=task["lr"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        report_to="none",
        save_strategy="no",
        logging_steps=task["minibatches"],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(rows(tokenizer, task, steps=steps, seed=seed))),
        processing_class=tokenizer,
        callbacks=[Record()],
    )
    trainer.train()


def rows(tokenizer: Any, task: dict[str, Any], *, steps: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield the prompts of a run of this seed, in the order in which rlfusion draws them."""
    from stalesync.prompts import DataConfig, PromptSource

    config = DataConfig(source="addition", max_prompt_length=8, prompts_per_step=task["prompts"])
    source = PromptSource(config, tokenizer, seed)
    for _ in range(steps):
        yield from ({"prompt": prompt.text, "answer": prompt.answer} for prompt in source.next())
