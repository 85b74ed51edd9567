"""List the families by their `model_type`."""

from collections.abc import Mapping

from fusion.model.families.base import Family
from fusion.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fusion.model.families.glm4_moe import GLM4_MOE
from fusion.model.families.llama import LLAMA, QWEN2
from fusion.model.families.mixtral import MIXTRAL
from fusion.model.families.olmoe import OLMOE
from fusion.model.families.pangu import PANGU_ULTRA_MOE
from fusion.model.families.qwen2_moe import QWEN2_MOE
from fusion.model.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        QWEN3,
        QWEN3_MOE,
        LLAMA,
        QWEN2,
        MIXTRAL,
        OLMOE,
        QWEN2_MOE,
        GLM4_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        PANGU_ULTRA_MOE,
    )
}
ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""`model_type` of published checkpoints that are of a family and name another one; exports have the family's."""
