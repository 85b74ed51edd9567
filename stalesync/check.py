"""Check a job before it starts: what it reads, how it is scored, how much memory it takes, what its settings mean.
Starts neither Ray nor a card; the part without estimates is the one that a run does itself (`prepare.py`)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fusion.model import ModelConfig
from fusion.telemetry.memory import human_bytes
from stalesync.job import automatic
from stalesync.job.config import Config
from stalesync.job.keys import without_effect
from stalesync.job.tokenizer_folder import describe_masked
from stalesync.job.workload import estimate
from stalesync.prepare import prepare, start_environments, start_rewards
from stalesync.prompts import Prompt, PromptSource

NUM_ROWS = 1000
"""Maximum number of rows whose lengths and answers are looked at"""
BINS, BAR = 8, 40


def check(config: Config) -> list[str]:
    """Check a job, and print what it finds; return the warnings. Raise ValueError if the job would be refused."""
    with collecting_warnings() as warnings, ExitStack() as stack:
        model = config.validate()
        stated, config = config, config.resolved()
        tokenizer, source, opened, spec = prepare(config, model)
        assert spec.detokenizer is not None
        prompts = source.sample(NUM_ROWS)
        masked = describe_masked(spec.masked_ids, model.vocab_size)
        show("tokenizer", [*describe_tokenizer(tokenizer, source, prompts[0], spec.detokenizer.end_token_ids), *masked])
        show("prompts", describe_prompts(config, source, prompts))
        _, _, files, calls = start_rewards(stack, config, source, opened, num_answers=NUM_ROWS)
        show("reward", ([f"{config.reward.model}: not called"] if config.reward.model else []) + calls)
        _, lines = start_environments(stack, config, source, spec)
        show("environment", lines)
        show("evaluation", [f"{file.name}: {file.rows.describe()}" for file in files if file.rows is not None])
        show("memory of a card", describe_memory(config, model))
        balancing = [config.training.describe_balancing(model.router_aux_coef)] if model.num_experts else []
        lora = [config.training.describe_lora()] if config.training.lora.rank else []
        show("settings without effect", without_effect(config))
        show("settings", list(filter(None, [automatic.describe(stated, config)])))
        num_rows = None if source.num_rows is None else source.num_rows - source.num_too_long
        show("a step", describe_step(config, prompts, num_rows=num_rows) + lora + balancing)
    return warnings


def show(title: str, lines: Sequence[str]) -> None:
    """Print a section, if it has lines."""
    if lines:
        print(title, *(f"  {line}" for line in lines), sep="\n", flush=True)


@contextmanager
def collecting_warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged in the block, in place of the handlers that print them."""
    messages: list[str] = []
    root, handler = logging.getLogger(), logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before, root.handlers = root.handlers, [handler]
    try:
        yield messages
    finally:
        root.handlers = before


def describe_tokenizer(tokenizer: Any, source: PromptSource, prompt: Prompt, end_token_ids: Sequence[int]) -> list[str]:
    """Return how a prompt ends as the model reads it, and what ends a response."""
    prefill = source.template.prefill
    kind = "prompts rendered by the chat template" if source.template.applies else "prompts as they are"
    return [
        f"{len(tokenizer):,} tokens; {kind}" + (f", which begins every response with {prefill!r}" if prefill else ""),
        f"a prompt ends with {tokenizer.decode(prompt.ids[-20:])!r}",
        f"a response ends with {' or '.join(tokenizer.convert_ids_to_tokens([*end_token_ids])) or 'no token'}",
    ]


def describe_prompts(config: Config, source: PromptSource, prompts: Sequence[Prompt]) -> list[str]:
    """Return the number of rows, of those that are dropped and why, and a histogram of lengths in tokens."""
    num_too_long = source.num_too_long
    rows = "endless" if source.num_rows is None else f"{source.num_rows - num_too_long:,} rows an epoch"
    held_out = len(source.evaluation(config.run.eval_prompts)) if source.rows.digest else 0
    rows += f"; {held_out:,} held out" if held_out else ""
    dropped = [
        f"{count:,} dropped: {reason}"
        for count, reason in (
            (source.rows.num_bad, "cannot be used (data.bad_rows)"),
            (num_too_long, f"longer than data.max_prompt_length={config.data.max_prompt_length}"),
        )
        if count
    ]
    return ["; ".join((f"{config.data.source}: {rows}", *dropped)), *histogram([len(prompt.ids) for prompt in prompts])]


def histogram(lengths: Sequence[int]) -> list[str]:
    """Return a bar for each of up to `BINS` ranges of lengths of equal width."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = [0] * ((high - low) // width + 1)
    for length in lengths:
        counts[(length - low) // width] += 1
    names = [f"{low + place * width}-{min(high, low + (place + 1) * width - 1)}" for place in range(len(counts))]
    longest = max(map(len, names))
    bars = ["#" * -(-count * BAR // max(counts)) for count in counts]
    rows = zip(names, bars, counts, strict=True)
    return [f"{name:>{longest}} tokens {bar} {count}" for name, bar, count in rows]


def describe_memory(config: Config, model: ModelConfig) -> list[str]:
    """Return the estimated memory of a card in each phase; log a warning if a phase does not fit."""
    setup, sizes = estimate(config, model)
    usable = setup.hardware.usable_bytes
    whose = "" if config.cluster.hardware or config.device.capacity_bytes else f" of {setup.hardware.name}"
    twice = "; with model.dtype=float32 a card takes up to twice as much" if config.model.dtype == "float32" else ""
    return [
        *(f"{phase}: {human_bytes(sizes.total(phase))} of {human_bytes(usable)}{whose}" for phase in sizes.phases),
        f"KV cache: {sizes.kv_tokens:,} tokens, {sizes.kv_tokens // config.longest_sample:,} samples of maximum length",
        f"trains in {config.train_layout}, generates in {config.infer_layout}; estimated for bfloat16 weights{twice}",
    ]


def describe_step(config: Config, prompts: Sequence[Prompt], *, num_rows: int | None) -> list[str]:
    """Return what the settings of a step mean together."""
    algorithm, training, staleness = config.algorithm, config.training, config.stalesync.max_staleness
    num_prompts, group = config.data.prompts_per_step, algorithm.group_size
    samples, response = num_prompts * group, config.rollout.max_response_length
    prompt = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    epochs = "" if num_rows is None else f", {config.run.steps * num_prompts / num_rows:.2g} epochs"
    tokens = f"{samples * (prompt + response):,.0f} tokens ({prompt:.0f} of a mean prompt, {response:,} of a response)"
    updates = f"{algorithm.minibatches} updates of {samples // algorithm.minibatches:,} samples"
    return [
        f"{num_prompts:,} prompts x {group} responses = {samples:,} samples; at most {tokens}",
        f"{updates}, learning rate {training.peak_lr:g} ({training.schedule}), KL weight {algorithm.kl_coef:g}",
        f"samples are at most {staleness} versions old, correction {algorithm.correction}",
        f"{config.run.steps:,} steps{epochs}; {config.cluster.npus} cards, {config.fusion.deployment}",
    ]
