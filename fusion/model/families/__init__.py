"""Families of models: what of a Hugging Face folder is particular to one `model_type`, a small file each.

base       Family: reads the layers' specification from a config.json, writes it back, names the tensors
qwen3      qwen3, qwen3_moe;   llama   llama, qwen2;   mixtral;   olmoe;   qwen2_moe;   glm4_moe
latent     what families with latent attention share;   deepseek   deepseek_v2, deepseek_v3;   pangu   pangu_ultra_moe
"""

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
