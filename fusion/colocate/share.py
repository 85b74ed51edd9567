"""Define the resources of the inference phase: which engines run, how much HBM of each card, how many sequences.

A share is valid from one switch to INFER to the next, so it can change between two steps of a run. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusion.inference.config import RolloutConfig

LIMITS = ("kv_fraction", "max_kv_tokens", "max_seqs")
"""Keys of `rollout.engine` that a share has"""
KEYS = ("engines", *(f"rollout.engine.{name}" for name in LIMITS))
"""Settings that can be changed during a run; all except the first start with the config's value."""


@dataclass(frozen=True)
class InferenceShare:
    """``engines``: numbers of the engines that generate, ascending; the other fields as in `EngineConfig`."""

    engines: tuple[int, ...]
    kv_fraction: float
    max_seqs: int
    max_kv_tokens: int | None = None

    @classmethod
    def of(cls, config: RolloutConfig, engines: int) -> "InferenceShare":
        return cls(tuple(range(engines)), **{name: getattr(config.engine, name) for name in LIMITS})

    def rollout(self, config: RolloutConfig) -> RolloutConfig:
        """Return the config of an engine under this share."""
        limits = {name: getattr(self, name) for name in LIMITS}
        tokens = max(config.engine.max_batch_tokens, self.max_seqs)  # every running sequence decodes one token a step
        return replace(config, engine=replace(config.engine, max_batch_tokens=tokens, **limits))

    def changed(
        self, changes: Mapping[str, Any], config: RolloutConfig, *, engines: int, max_tokens: int
    ) -> "InferenceShare":
        """Return this share with some of KEYS changed. ``changes``: key → value as a user writes it: numbers, null,
        engines as `all` or `0,2`; ``engines``: number of engines of the run; ``max_tokens``: tokens of the longest
        possible sample. Raise ValueError, with accepted values, for other keys or a value out of range."""
        share = self
        for key, value in changes.items():
            if key not in KEYS:
                raise ValueError(f"{key!r} cannot be changed during a run; expected one of {', '.join(KEYS)}")
            name = key.rpartition(".")[2]
            parsed: Any = _engines(value, engines) if name == "engines" else _number(key, value)
            share = replace(share, **{name: parsed})
        share.rollout(config).validate()
        if config.backend == "vllm" and share.max_seqs > config.engine.max_seqs:
            raise ValueError(
                f"rollout.engine.max_seqs={share.max_seqs}: expected at most {config.engine.max_seqs}, the value at "
                "the start, with rollout.backend=vllm, whose buffers are sized once"
            )
        share.check_longest(config, max_tokens)
        return share

    def check_longest(self, config: RolloutConfig, max_tokens: int) -> None:
        """Check that an attention rank's KV cache may hold the longest sample. Raise ValueError if
        `rollout.engine.max_kv_tokens` does not allow it."""
        size, limit = config.engine.block_size, self.max_kv_tokens
        if limit is not None and limit // size * size < max_tokens:
            raise ValueError(
                f"rollout.engine.max_kv_tokens={limit}: expected null, or at least the longest sample or answer of an "
                "evaluation (data.max_prompt_length + the larger of rollout.max_response_length and "
                f"eval.max_response_length = {max_tokens} tokens) in whole blocks of rollout.engine.block_size={size}"
            )

    def state(self) -> dict[str, Any]:
        """Return the share in the format of `changed`, which checkpoints and the run's records contain."""
        limits = {f"rollout.engine.{name}": getattr(self, name) for name in LIMITS}
        return {"engines": ",".join(map(str, self.engines)), **limits}

    def __str__(self) -> str:
        return " ".join(f"{key}={'null' if value is None else value}" for key, value in self.state().items())


def _engines(value: Any, count: int) -> tuple[int, ...]:
    if value == "all":
        return tuple(range(count))
    numbers = str(value).split(",")
    if not all(number.strip().isdigit() and int(number) < count for number in numbers):
        raise ValueError(f"engines={value}: expected all, or numbers of engines between 0 and {count - 1} (0,2)")
    return tuple(sorted({int(number) for number in numbers}))


def _number(key: str, value: Any) -> float | int | None:
    whole = key != "rollout.engine.kv_fraction"
    if key == "rollout.engine.max_kv_tokens" and value in (None, "null"):
        return None
    try:
        return int(str(value)) if whole else float(str(value))
    except ValueError:
        raise ValueError(f"{key}={value}: expected a {'whole number' if whole else 'number in (0, 1]'}") from None
