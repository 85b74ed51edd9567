"""Payload: stores the bytes of samples in shared memory or on disk, and copies them into a reader's memory.

A put is one segment; a batch is runs of rows of many segments, and each of its bytes is copied once.

    put    columns ──► segment_file.py    a segment: bare, aligned buffers in one file of shared memory or disk; and
                            │             the files that a process has mapped
                            │ shard.py    one per node: serves readers and writers of other nodes, moves files
    get    columns ◄── gather.py          many segments into one buffer (buffers.py), on several threads

    columns.py  a client's columns viewed as bytes, and gathered bytes as columns; shards do without it and torch
    access.py   a client's reads and writes: files of its own node directly, others through their shards
    wire.py     columns between machines: a small header and bare bytes
"""
