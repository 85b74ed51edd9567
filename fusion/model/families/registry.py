"""List the families by their `model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.model.families.base import Family
from fusion.model.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (QWEN3, QWEN3_MOE)}
