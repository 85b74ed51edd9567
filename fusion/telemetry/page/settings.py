"""Flatten the config of runs, and find the keys in which they differ. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

EXPECTED_TO_DIFFER = ("run.name", "run.resume")
"""Keys that say nothing about a difference in results; they are listed last."""


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the values by key (`run.steps`), each as JSON text, so that `1` and `"1"` differ."""
    if not isinstance(config, Mapping):
        return {prefix: json.dumps(config, default=str, ensure_ascii=False)} if prefix else {}
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        flat |= flatten(value, name) if value else {name: json.dumps(value, default=str)}
    return flat


def differences(settings: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return `key` and `values` (of each run; None where a run lacks the key) of the keys that are not equal in all."""
    keys = dict.fromkeys(key for run in settings for key in run)
    rows = [{"key": key, "values": [run.get(key) for run in settings]} for key in keys]
    differ = [row for row in rows if len(set(row["values"])) > 1]
    return sorted(differ, key=lambda row: row["key"] in EXPECTED_TO_DIFFER)
