"""Read samples from the queue on a card that trains or scores, and convert them for the trainer.

reader       reads what a stage needs from the queue, once for all ranks that need the same; the next batch ahead
sequences    the queue's columns as the trainer's sequences
"""
