"""Adapters of other trainers to this project's interfaces.

    megatron        describes Megatron-Core's local tensors as a parameter table: names, shapes, boxes. Pure.
    megatron_model  builds that model with the installed megatron-core on a card

The other packages import nothing from here; only `megatron_model` imports megatron-core.
"""
