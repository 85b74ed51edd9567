"""The model: one definition for training and inference, and what of it each rank holds.

config        ModelConfig: the shape, from and to a Hugging Face config.json
parallel      Parallel: the grid of ranks as arithmetic; Mesh: one rank's process groups
table         LocalParam and Part: logical slices of global tensors, physical places in local ones
weights       Buckets: storage in units (or buckets) that can be released, taken back and shared under live views
matrix        a weight matrix as one parameter or as blocks of rows
collectives   gather, reduce-scatter, exchange of packed rows, with gradients
transformer   Transformer: embedding, layers, logits; `attend` is what the caller brings
moe           router, token exchange over EP and expert-TP, grouped experts, load-balancing loss
replay        the experts of a pass as a column, imposed on another pass
huggingface   load_weights, save_folder: straight into and out of any layout
"""

from fusion.model.config import ModelConfig
from fusion.model.huggingface import check_folder, load_weights, save_folder
from fusion.model.moe import load_balancing_loss
from fusion.model.parallel import Mesh, Parallel
from fusion.model.replay import Replay, Routed, routing_dtype, routing_of
from fusion.model.table import LocalParam, Part, Placement, global_params, local_params
from fusion.model.transformer import Attend, PackedAttention, Transformer
from fusion.model.weights import BucketPlan, Buckets, plan_buckets, plan_units, unit_bytes

__all__ = [
    "Attend",
    "BucketPlan",
    "Buckets",
    "LocalParam",
    "Mesh",
    "ModelConfig",
    "PackedAttention",
    "Parallel",
    "Part",
    "Placement",
    "Replay",
    "Routed",
    "Transformer",
    "check_folder",
    "global_params",
    "load_balancing_loss",
    "load_weights",
    "local_params",
    "plan_buckets",
    "plan_units",
    "routing_dtype",
    "routing_of",
    "save_folder",
    "unit_bytes",
]
