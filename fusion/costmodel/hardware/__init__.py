"""Describe cards: constants of an accelerator and of its machine, each with unit and source.

    ascend_910b.yaml ┐
    ascend_910c.yaml ├─ load: keys, units and numbers checked ──► Hardware, with its Topology
    h100.yaml        │
    h800.yaml        ┘        hardware_named("h100")

A *die* is what one worker has: one of two in an Ascend 910C package, a whole card elsewhere. Measured constants are
preferred to promised ones; a constant without a published source is marked as assumed and shown as such."""

from fusion.costmodel.hardware.load import Figure, Hardware, hardware_named, hardware_names, load_hardware

__all__ = ["Figure", "Hardware", "hardware_named", "hardware_names", "load_hardware"]
