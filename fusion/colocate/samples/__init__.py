"""Samples on a card that trains or scores: read from the queue, handed to the trainer.

reader       reads what a stage needs from the queue, once for all ranks that need the same
sequences    the queue's columns as the trainer's sequences
"""
