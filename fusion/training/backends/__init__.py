"""Other trainers behind this house's interfaces.

    megatron        Megatron-Core's local tensors as a parameter table: names, shapes, and which box lies where, pure
    megatron_model  builds that model (of the installed megatron-core) on a card

Nothing here is imported by the rest of the house; megatron-core is imported by `megatron_model` alone.
"""
