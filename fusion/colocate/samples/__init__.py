"""Samples on a card, between queue, engine and trainer.

columns      the queue's columns and what engine and trainer speak
generating   the engine at work: what has ended goes to the queue as it comes
partials     those that were suspended, in the queue until an engine goes on with them
reading      what a stage reads from the queue
"""
