"""The page of config keys, generated from the dataclasses, shows all keys with what their validation accepts."""

import re
from dataclasses import dataclass, field

import pytest

from scripts.docs.config_reference import accepted, facts, page
from stalesync.job.config import Config
from stalesync.job.keys import keys_of
from stalesync.job.overrides import known_keys

PAGE = page()


def test_every_key_has_a_section_with_type_default_and_sentence():
    sections = re.split(r"^### `([\w.]+)` \{ #[\w.]+ \}$", PAGE, flags=re.MULTILINE)
    by_key = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert list(by_key) == known_keys() and len(sections[1::2]) == len(by_key)
    for key, section in by_key.items():
        text, kind = section.strip().split("\n\n")[:2]
        assert text and not text.startswith("- "), key
        assert re.match(r"- type: .+\n- default: `.+`", kind), key


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        (
            "run.steps",
            "- type: whole number\n- default: `100`\n- accepted: a whole number of at least 1\n- read by: simulate\n",
        ),
        ("run.resume", "- type: text\n- default: `false`\n- accepted: one of false, true, auto\n"),
        ("cluster.address", "- type: text or null\n- default: `null`\n"),
        (
            "fusion.offload",
            "- type: text\n- default: `switch`\n- accepted: one of none, switch, stream\n- read by: plan, simulate\n",
        ),
        ("training.betas", "- type: list of numbers\n- default: `[0.9, 0.95]`\n"),
        ("parallel.train.tp", "- type: whole number\n- default: `1`\n- read by: plan, simulate\n"),
        (
            "rollout.kv_pool.max_spilled_mib",
            "- type: whole number or null\n- default: `null`\n- accepted: a whole number of at least 1, or null\n"
            "- has an effect with: rollout.kv_pool.suspended=pool and rollout.kv_pool.spill set\n",
        ),
        (
            "rollout.engine.batch_invariant",
            "- type: true or false\n- default: `false`\n"
            "- not with `vllm`: vLLM's results depend on the batch by rounding\n",
        ),
    ],
)
def test_facts_of_a_key(key, facts):
    section = PAGE.split(f"### `{key}` ")[1].split("\n#")[0]
    assert section.endswith(f"\n\n{facts}")


@dataclass
class Inner:
    rate: float | None = None
    """A rate."""

    def validate(self):
        if not isinstance(self.rate, float):
            raise ValueError(f"inner.rate={self.rate!r}: expected a number in [0, 1], or null")


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)


def test_accepted_values_are_those_of_the_validation():
    (key,) = keys_of(Outer).values()
    assert (key.path, key.text) == ("inner.rate", "A rate.") and accepted(
        Inner(), "rate"
    ) == "a number in [0, 1], or null"
    assert facts(key, Outer()) == [
        "- type: number or null",
        "- default: `null`",
        "- accepted: a number in [0, 1], or null",
    ]


def test_accepted_values_do_not_change_the_config():
    config = Config()
    page(config)
    assert config == Config()
