"""Families of models: what of a Hugging Face folder is particular to one `model_type`, a small file each.

base       Family: reads the layers' specification from a config.json, writes it back, names the tensors
qwen3      qwen3, qwen3_moe;   llama   llama, qwen2;   mixtral;   olmoe;   qwen2_moe;   glm4_moe
latent     what families with latent attention share;   deepseek   deepseek_v2, deepseek_v3;   pangu   pangu_ultra_moe
registry   FAMILIES: all of them by model_type
"""
