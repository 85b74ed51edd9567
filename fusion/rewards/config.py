"""Define the config group `reward`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusion.rewards.terms import TermSpec
from fusion.telemetry.keys import MAX_TIMEOUT_S, SET, as_yaml, key
from fusion.telemetry.validation import Checks, Group

BUILT_IN = {
    "arithmetic": "fusion.rewards.arithmetic:arithmetic",
    "counting": "fusion.rewards.counting:counting",
    "math": "fusion.rewards.math:math_answer",
}
"""Module and function of each rule"""
PACED_RULE = {"device.pace": SET, "model": (None,), "name": (*BUILT_IN, "custom")}
"""Where a rule or function scores beside paced cards"""
MIN_MEMORY_MIB = 128
"""An interpreter with the packages of a simple reward needs about as much."""
MAX_MEMORY_MIB = 1 << 30
"""More than any host has; the kernel counts bytes in 64 bits."""


@dataclass(frozen=True)
class RewardSpec:
    """What the processes of a pool compute. ``kind``: `arithmetic`, `math`, `custom` or `format`; ``target``: of
    `custom` the `file.py:function`, of `format` the pattern, of a rule that in BUILT_IN; ``label``: in messages."""

    kind: str
    target: str | None
    label: str


@dataclass
class RewardConfig(Group, path="reward"):
    """How a response is scored."""

    name: str = key("arithmetic", one_of=(*BUILT_IN, "custom", "environment"))
    """`arithmetic` (exact match of the answer), `counting` (share of the digits asked for that count on),
    `math` (mathematical equality by math-verify), `custom` (`reward.path`) or `environment` (what the environment gives
    for the turns of a conversation)."""

    path: str | None = None
    """Your own reward function as `file.py:function`, `fn(prompt, response, answer, **fields) -> float` or, of a batch,
    `fn(prompts, responses, answers, **fields) -> list[float]`; implies `custom`. A field `other_responses` is the other
    responses of the group."""

    model: str | None = key(None, timeless=False, read_by="simulate")
    """Folder of a reward model (`Qwen3ForSequenceClassification` with one label, or its MoE counterpart). Its score of
    prompt and response replaces the rule; `fusion` configures the cards that it runs on."""

    time_limit_s: float = key(5.0, above=0, at_most=MAX_TIMEOUT_S)
    """Timeout of one sample, or of one call for a batch, in seconds of wall time; its process is then replaced and the
    sample counts as failed."""

    workers: int = key(2, at_least=1, at_most=4096, read_by="simulate")
    """Number of processes that score samples in parallel."""

    latency_s: float = key(0.0, at_least=0, only=PACED_RULE, timeless=False, read_by="simulate")
    """Modelled seconds that a process takes at least to score a sample, beside paced cards and in a simulation. Terms,
    and rewards of `eval.files`, take the time that they need."""

    memory_mib: int | None = key(4096, at_least=MIN_MEMORY_MIB, at_most=MAX_MEMORY_MIB)
    """Maximum private memory in MiB of a process that scores, and of each process that it starts; a sample that exceeds
    it counts as failed. null: no limit."""

    terms: list[Any] = field(default_factory=list)
    """Further terms of the reward, each added with its weight and logged as `critic/rewards/<name>/mean`, as is the
    reward itself: `{reward: REWARD, name: NAME, weight: 1.0}` with `arithmetic`, `math`, `file.py:function`; `{reward:
    format, pattern: REGEX}`: 1 if it matches the whole response, else 0; `{reward: length, free_tokens: N, max_tokens:
    M}`: 0 up to N tokens, falling to -1 at M. The name defaults to that of the reward or of its function."""

    max_failed_share: float = key(0.5, at_least=0, at_most=1)
    """The run ends if more than this share of the last 256 samples could not be scored (from the 64th on; at the end of
    the run any number is judged). 1: never."""

    @property
    def kind(self) -> str:
        """The effective reward: `model` or `custom` where `reward.model` or `reward.path` is set, else `name`."""
        return "model" if self.model else "custom" if self.path else self.name

    @property
    def title(self) -> str:
        """Name of the reward among its terms."""
        return self.path.rpartition(":")[2] if self.kind == "custom" and self.path else self.kind

    @property
    def spec(self) -> RewardSpec:
        """What processes compute for the reward itself, without its terms."""
        path = self.path if self.kind == "custom" else None
        label = f"reward.path={path!r}" if path else f"reward.name={self.name!r}"
        return RewardSpec(self.kind, path or BUILT_IN.get(self.kind), label)

    def of(self, reward: str) -> "RewardConfig":
        """Return the config of another reward, a rule or `file.py:function`, with the same limits and no terms."""
        built_in = reward in BUILT_IN
        name, path = (reward, None) if built_in else ("custom", reward)
        return replace(self, name=name, path=path, model=None, terms=[])

    def term_specs(self) -> list[TermSpec]:
        """Return the terms, checked. Raise ValueError: an entry of `reward.terms` is not accepted, by key."""
        if not isinstance(self.terms, list):
            raise ValueError(f"reward.terms={self.terms!r}: expected a list")
        places = [f"reward.terms[{index}]" for index in range(len(self.terms))]
        specs = [TermSpec.parse(entry, place, BUILT_IN) for entry, place in zip(self.terms, places, strict=True)]
        names = [self.title]
        for spec, place in zip(specs, places, strict=True):
            if spec.name in names:
                raise ValueError(f"{place}.name={spec.name!r}: expected another name than those of {', '.join(names)}")
            if ":" in spec.reward:
                try:
                    split_path(spec.reward)
                except ValueError as error:
                    raise ValueError(f"{place}.reward={spec.reward!r}: {error}") from None
            names.append(spec.name)
        return specs

    def check(self, check: Checks) -> None:
        if self.model and self.path:
            raise ValueError(f"reward.model={self.model!r} and reward.path={self.path!r}: expected only one of them")
        if self.kind == "custom":
            split_path(self.path)
        self.term_specs()


def split_path(path: str | None, key: str = "reward", defines: str = "function") -> tuple[Path, str]:
    """Split `reward.path`, or that of another group ``key``, into its file and the name defined there.
    ``defines``: what the name is of, in messages.
    Raise ValueError: the path is not set, is not of the form `file.py:name`, or its file does not exist."""
    if not path:
        raise ValueError(f"{key}.path={as_yaml(path)}: expected file.py:{defines}, as {key}.name='custom'")
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{key}.path={path!r}: expected file.py:{defines}")
    if not Path(file).is_file():
        raise ValueError(f"{key}.path={path!r}: expected an existing file; {Path(file).absolute()} does not exist")
    return Path(file), name
