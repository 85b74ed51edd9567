"""Define the tail of a step's generation."""

TAIL = 0.1
"""Generation's tail (`timing_s/gen_tail`): the time in which at most this fraction of a step's samples is still being
generated"""
