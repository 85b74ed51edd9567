"""The model: one definition for training and inference, and what of it each rank holds.

config        ModelConfig: the shape, from and to a Hugging Face config.json
parallel      Parallel: the grid of ranks as arithmetic;   mesh   Mesh: one rank's process groups
table         LocalParam and Part: logical slices of global tensors, physical places in local ones
weights       Buckets: storage in units (or buckets) that can be released, taken back and shared under live views
holder        WeightHolder: what loading, switching and export need of whoever computes with weights
matrix        a weight matrix as one parameter or as blocks of rows
collectives   gather, reduce-scatter, exchange of packed rows, with gradients
transformer   Transformer: embedding, layers, logits; `attend` is what the caller brings
moe           router, token exchange over EP and expert-TP, grouped experts, load-balancing loss
replay        the experts of a pass as a column, imposed on another pass
huggingface   load_weights, save_folder: straight into and out of any layout;   folder   check_folder: reads an index
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
