"""Define the config group `environment`."""

from dataclasses import dataclass

from fusion.rewards.config import MAX_MEMORY_MIB, MIN_MEMORY_MIB, split_path
from fusion.telemetry.keys import MAX_TIMEOUT_S, Unsupported, key
from fusion.telemetry.validation import Checks, Group

BUILT_IN = {
    "calculator": "fusion.environments.calculator:Calculator",
    "guess": "fusion.environments.guess:Guess",
}
"""Module and class of each environment"""
TOOL_FORMATS = ("hermes", "llama3", "deepseek", "kimi_k2", "glm45", "qwen3_coder")
TURNS = {"name": (*BUILT_IN, "custom")}


@dataclass
class EnvironmentConfig(Group, path="environment"):
    """The environment that answers the model's turns, and its limits."""

    name: str = key(
        "single",
        one_of=("single", *TURNS["name"]),
        unsupported_by={"vllm": Unsupported("vLLM's requests are not continued behind what an environment said")},
    )
    """`single` (one response to each prompt), `calculator` (sums, with a tool), `guess` (a number from 0 to 15,
    answered by "higher" and "lower") or `custom` (`environment.path`)."""

    path: str | None = key(None, only={"name": ("custom",)})
    """Your own environment as `file.py:Class` (docs/environments.md)."""

    max_turns: int = key(8, at_least=1, only=TURNS)
    """Maximum number of turns of the model in a conversation."""

    tools: str = key("hermes", one_of=TOOL_FORMATS, only=TURNS)
    """Format in which the model calls tools: `hermes` (Qwen's, a JSON object between `<tool_call>` tags), `llama3` (a
    turn that is a JSON object with `name` and `parameters`), `deepseek` (V3's and V3.1's own tokens), `kimi_k2` (its
    own tokens), `glm45` or `qwen3_coder` (each argument between tags)."""

    reward: str = key("last", one_of=("last", "sum"), only=TURNS)
    """Reward of a conversation with `reward.name=environment`: the `last` that the environment gave, or their `sum`."""

    step_timeout_s: float = key(60.0, above=0, at_most=MAX_TIMEOUT_S, only=TURNS)
    """Timeout of one step of the environment, and of its reset, in seconds of wall time."""

    episode_timeout_s: float = key(600.0, above=0, at_most=MAX_TIMEOUT_S, only=TURNS)
    """Maximum seconds that an environment may spend on all steps of a conversation; the model's own time does not
    count."""

    retries: int = key(2, at_least=0, only=TURNS)
    """Number of times that a conversation whose environment failed is continued in a fresh one; the next failure ends
    its group as `failed:env_<kind>`."""

    workers: int = key(1, at_least=1, at_most=4096, only=TURNS)
    """Number of processes with environments; each runs hundreds of conversations at once."""

    memory_mib: int | None = key(4096, at_least=MIN_MEMORY_MIB, at_most=MAX_MEMORY_MIB, only=TURNS)
    """Maximum private memory in MiB of a process with environments, and of each process that it starts. null: no
    limit."""

    @property
    def label(self) -> str:
        """The environment in messages, by the key that selects it."""
        return f"environment.path={self.path!r}" if self.name == "custom" else f"environment.name={self.name!r}"

    def check(self, check: Checks) -> None:
        if self.name == "custom":
            split_path(self.path, "environment", "Class")
