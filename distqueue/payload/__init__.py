"""Payload: where the bytes of samples lie, and how a reader gets them into memory of its own.

A put is one segment; what a reader asks for is runs of many segments, and each byte of it is copied once.

    put    columns ──► segment_file.py    a segment: bare, aligned buffers in one file of shared memory or disk
                            │ mapped.py   files as a process has them mapped
                            │ shard.py    one a node: serves readers and writers of other nodes, moves files
    get    columns ◄── gather.py          many segments into one of buffers.py, on some threads (copying.py)

    reach.py    a client's way there: files of its own node directly, all others through their shards
    wire.py     columns as they cross machines: a small header and bare bytes
"""
