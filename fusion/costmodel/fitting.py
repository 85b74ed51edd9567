"""Find the settings with which a setup fits: decisions, from estimates alone.

Tried are the settings that trade time for memory (`alternatives`), one alone before two together, and of equally many
those that cost the least time. Invariants: what is found fits; nothing smaller does; a setup that fits needs nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.search import context_sizes, problems, shared_kv_sizes
from fusion.costmodel.setup import Setup
from fusion.telemetry.keys import as_yaml

MAX_TOGETHER = 3
"""Number of settings that are changed together at most"""


def alternatives(setup: Setup) -> list[tuple[str, Any]]:
    """Return settings that take less memory, as (config key, value), by the time that they cost, least first."""
    changes: list[tuple[str, Any]] = []
    if setup.fusion.double_buffer and not setup.shared:
        changes.append(("fusion.double_buffer", False))
    changes += [("fusion.offload", "switch")] if setup.fusion.offload == "none" else []
    changes += [("fusion.offload", "stream")] if setup.fusion.offload != "stream" else []
    changes += [] if setup.training.recompute else [("training.recompute", True)]
    longest, tokens = setup.workload.longest_sample, setup.training.token_budget // 2
    while tokens >= longest:
        changes.append(("training.token_budget", tokens))
        tokens //= 2
    changes += [("parallel.infer.dcp", dcp) for dcp in shared_kv_sizes(setup, setup.infer)]
    sizes = [cp for cp in context_sizes(setup, setup.train) if cp > setup.train.cp]
    return changes + [("parallel.train.cp", cp) for cp in sizes]


def changed(setup: Setup, settings: Mapping[str, Any]) -> Setup:
    """Return a setup with other settings, by config key."""
    for key, value in settings.items():
        *_, group, name = key.split(".")  # `train` and `infer` of `parallel` are fields of a setup themselves
        setup = replace(setup, **{group: replace(getattr(setup, group), **{name: value})})
    return setup


def fitting_settings(setup: Setup) -> dict[str, Any] | None:
    """Return the fewest settings to change, by config key, so that everything fits; {} if it does, None if none do."""
    options = alternatives(setup)
    for count in range(MAX_TOGETHER + 1):
        for chosen in combinations(options, count):
            settings = dict(chosen)
            other = changed(setup, settings)
            if len(settings) == count and not problems(other, estimate_memory(other)):
                return settings
    return None


def advice(setup: Setup) -> str:
    """Return with which settings a setup that does not fit would, in words."""
    settings = fitting_settings(setup)
    if settings is None:
        return "no setting makes it fit: use more cards, or split the model more (parallel.train, parallel.infer)"
    return "it fits with " + " ".join(f"{key}={as_yaml(value)}" for key, value in settings.items())
