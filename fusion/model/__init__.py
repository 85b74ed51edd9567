"""The model: one definition for training and inference, and the shards of it that each rank holds.

spec          LayerSpec: what a layer consists of;   families   reads it from a config.json, one file per model_type
config        ModelConfig: the layers and what surrounds them, from and to a Hugging Face config.json
parallel      Parallel: the grid of ranks as arithmetic;   mesh   Mesh: one rank's process groups
local_param   LocalParam and Part: logical slices of global tensors, physical places in local ones
table         the local tensors of every rank of a layout;   shares   makes them from shares of global tensors
formats       the tables of other programs' models, by name: Megatron-Core
bucket_plan   which parameters are stored together in a unit or a bucket (pure)
weights       Buckets: their storage, which can be released, reallocated and shared under live views
holder        WeightHolder: the interface of a model that weights are loaded into, switched and exported from
matrix        a weight matrix as one parameter or as blocks of rows
collectives   gather, reduce-scatter, exchange of packed rows, with gradients;   exchange   their sizes
attention     grouped-query and latent attention with this rank's heads; the caller passes what attends
prefixes      which sequences share the rows of their prefix, pure;   shared_rows   where those are computed
ulysses       context parallel: attends to whole sequences of which each rank has some rows
transformer   Transformer: embedding, layers, head;   head   Head: logits;   tiling   the tiles they are computed in
id_mask       masks the logits of ids that no token has
moe           token exchange over EP and expert-TP, grouped experts, load-balancing loss;   router   chooses the experts
replay        record the experts of a forward pass as a column and replay them in another pass
stored        which tensors the files of a folder hold, from their headers;   hf_quantization   scales of float8 blocks
huggingface   load_weights, save_folder: directly into and out of any layout;   folder   check_folder: reads the index
gathering     gather_tensors: whole tensors on rank 0, from the parts of all ranks
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
