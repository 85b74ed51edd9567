"""The config group `eval`, and the names of its metrics, as verl names those of a validation.

verl (`RayPPOTrainer._val_metrics_update`, `process_validation_metrics`) writes `<section>/<data source>/<variable>/
<statistic>@<n>`, with the section `val-core` for the reward's statistics at the largest n and `val-aux` for all others.
Here the data source is the file's name and the variables are `reward` and `response_length`. `mean@n` is verl's.
`pass@n` is this project's: verl has `best@n/mean`, a bootstrap of the same quantity for rewards of 0 and 1."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from fusion.inference.config import RolloutConfig
from fusion.inference.request import SamplingParams
from fusion.inference.validation import check_sampling
from fusion.rewards.config import BUILT_IN, split_path
from fusion.rewards.terms import NAME
from fusion.telemetry.keys import key
from fusion.telemetry.validation import Checks, Group, fields_of
from stalesync.prompts.config import SUFFIXES, DataConfig

HELD_OUT = "held_out"
"""Name under which the held-out prompts of `data.source` are evaluated (`run.eval_prompts`)"""
Goal = Literal["max", "min"]


@dataclass(frozen=True)
class EvalFileSpec:
    """A file of `eval.files`, checked. ``reward``: `arithmetic`, `math` or `file.py:function`; None: the run's own;
    ``rows``: how many of its first rows are used; None: all."""

    path: str
    name: str
    reward: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    rows: int | None = None

    @classmethod
    def parse(cls, entry: Any, key: str) -> "EvalFileSpec":
        """Read an entry of `eval.files`; raise ValueError, by ``key`` (`eval.files[0]`), if it is not accepted."""
        fields = fields_of(entry, [item.name for item in dataclasses.fields(cls)], key)
        spec = cls(**{"name": PurePath(fields["path"]).stem, **fields})
        spec.validate(key)
        return spec

    def data(self, config: DataConfig, **changes: Any) -> DataConfig:
        """Return the config group `data` of a job with the file as its source."""
        fields = {name: getattr(self, name) or getattr(config, name) for name in ("prompt_field", "answer_field")}
        return dataclasses.replace(config, source=self.path, **fields, **changes)

    def validate(self, key: str) -> None:
        """Raise ValueError, by key, for a field that is not accepted. ``key``: of the entry."""
        check = Checks(key, self)
        check.that("path", self.path.endswith(SUFFIXES), f"a path ending in {' or '.join(SUFFIXES)}")
        named = isinstance(self.name, str) and bool(NAME.fullmatch(self.name))
        check.that("name", named, "letters, digits, and . _ - behind the first of them")
        check.that("name", self.name != HELD_OUT, f"another name: {HELD_OUT} are the held-out prompts of data.source")
        check.that("reward", _is_reward(self.reward), f"{', '.join(BUILT_IN)}, or an existing file.py:function")
        for name in ("prompt_field", "answer_field"):
            value = getattr(self, name)
            check.that(name, value is None or (isinstance(value, str) and bool(value)), "the name of a field")
        check.integer("rows", at_least=1, null=True)


@dataclass
class EvalConfig(Group, path="eval"):
    """What is evaluated, when, and which checkpoint is kept as the best."""

    every: int = key(0, at_least=0)
    """Number of steps between two evaluations, after steps `every`, `2 * every`, …; 0: there are only the two that
    every run has, before the first step and after the last one."""
    files: list[Any] = field(default_factory=list)
    """Files of prompts that are evaluated, besides the held-out ones of `data.source` (`run.eval_prompts`). Each is a
    path (.jsonl, .json, .parquet), or `{path: FILE, name: NAME, reward: REWARD, prompt_field: FIELD, answer_field:
    FIELD, rows: N}`: only the path is required. The name (default: the file's) appears in metrics; the reward is
    `arithmetic`, `math` or `file.py:function` (default: the run's own); the fields' names default to those of `data`;
    of `rows`, only the first N are used."""
    samples: int = key(1, at_least=1)
    """Number of answers to each prompt, k: the mean reward is over all of them, and pass@1 to pass@k are estimated."""
    temperature: float | None = None
    """Sampling temperature of an evaluation; 0: greedy; null: `rollout.sampling.temperature`."""
    top_k: int | None = None
    """`rollout.sampling.top_k` of an evaluation; null: that of the rollouts."""
    top_p: float | None = None
    """`rollout.sampling.top_p` of an evaluation; null: that of the rollouts."""
    min_p: float | None = None
    """`rollout.sampling.min_p` of an evaluation; null: that of the rollouts."""
    max_response_length: int | None = key(None, at_least=1)
    """Maximum number of tokens of an answer; null: `rollout.max_response_length`."""
    pass_reward: float = key(1.0, number=True)
    """Minimum reward of an answer that counts as correct in pass@k."""
    best: str | None = None
    """Metric by which the best checkpoint is chosen, such as `val-core/held_out/reward/mean@1`: whenever an evaluation
    after a step improves on it, a checkpoint is saved, which is kept besides the `run.keep` newest until a better one
    is saved, and `best.json` names it. Rewards and pass@k are to be high, response lengths low. null: none."""

    def check(self, check: Checks) -> None:
        check_sampling(check.group, SamplingParams(**self.sampling))
        check.that(
            "samples", self.samples == 1 or self.temperature != 0, "1 with eval.temperature=0, as all would be equal"
        )
        self.specs()

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` in which an evaluation differs from the rollouts."""
        fields = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        fields["max_tokens"] = self.max_response_length
        return {name: value for name, value in fields.items() if value is not None}

    def specs(self) -> list[EvalFileSpec]:
        """Return the files, checked; raise ValueError, by key, for an entry that is not accepted."""
        if not isinstance(self.files, Sequence) or isinstance(self.files, str):
            raise ValueError(f"eval.files={self.files!r}: expected a list")
        specs = [EvalFileSpec.parse(entry, f"eval.files[{index}]") for index, entry in enumerate(self.files)]
        index_by_name: dict[str, int] = {}
        for index, spec in enumerate(specs):
            if (first := index_by_name.setdefault(spec.name, index)) != index:
                raise ValueError(
                    f"eval.files[{index}].name={spec.name!r}: expected another name than that of eval.files[{first}]"
                )
        return specs

    def check_answers(self, rollout: RolloutConfig, max_prompt_length: int, *, max_positions: int) -> None:
        """Raise ValueError, by key, unless several answers to a prompt may differ, and an answer fits behind a prompt.
        ``max_positions``: of the model."""
        if self.samples > 1 and (rollout.sampling.temperature if self.temperature is None else self.temperature) == 0:
            raise ValueError(
                f"eval.samples={self.samples}: expected 1 with rollout.sampling.temperature=0, as all answers to a "
                "prompt would be equal; eval.temperature sets another one"
            )
        positions = min(rollout.max_length or max_positions, max_positions)
        size, capacity = rollout.engine.block_size, rollout.engine.max_kv_tokens
        if capacity is not None:
            positions = min(positions, capacity // size * size)
        left = positions - max_prompt_length
        if self.max_response_length is not None and self.max_response_length > left:
            raise ValueError(
                f"eval.max_response_length={self.max_response_length}: expected at most {left}, what is left of the "
                "positions of the model, of rollout.max_length and of the whole blocks in rollout.engine.max_kv_tokens "
                f"behind a prompt of data.max_prompt_length={max_prompt_length}"
            )

    def check_best(self, held_out: bool) -> Goal | None:
        """Return whether `eval.best` is to be high or low; None: it is not set. ``held_out``: whether held-out prompts
        are evaluated. Raise ValueError if no evaluation has a metric of this name."""
        if self.best is None:
            return None
        names = [*([HELD_OUT] if held_out else []), *(spec.name for spec in self.specs())]
        known = {metric: goal for name in names for metric, goal in goals(name, self.samples).items()}
        if self.best not in known:
            expected = f"one of {', '.join(known)}" if known else "null, as nothing is evaluated"
            raise ValueError(f"eval.best={self.best!r}: expected {expected}")
        return known[self.best]


def _is_reward(reward: Any) -> bool:
    if reward is None or reward in BUILT_IN:
        return True
    try:
        return isinstance(reward, str) and bool(split_path(reward))
    except ValueError:
        return False


def logged_statistics(samples: int) -> list[str]:
    """Return the statistics of a file that are metrics, of ``samples`` answers to each prompt: of pass@k those of the
    powers of two below ``samples``, and of ``samples``, as in verl."""
    logged_k = [1 << power for power in range((samples - 1).bit_length())] + [samples]
    return [f"reward/mean@{samples}", *(f"reward/pass@{k}" for k in logged_k), f"response_length/mean@{samples}"]


def metric_of(file: str, statistic: str, samples: int) -> str:
    """Return the name of the metric of a statistic, of ``samples`` answers to each prompt."""
    is_core = statistic in (f"reward/mean@{samples}", f"reward/pass@{samples}")
    return f"{'val-core' if is_core else 'val-aux'}/{file}/{statistic}"


def goals(file: str, samples: int) -> dict[str, Goal]:
    """Map the metrics of a file by which a checkpoint can be the best to whether more or less is better."""
    return {
        metric_of(file, statistic, samples): "max" if statistic.startswith("reward/") else "min"
        for statistic in logged_statistics(samples)
    }
