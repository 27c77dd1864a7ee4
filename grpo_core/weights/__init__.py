"""Transports of weights from the trainer to engines.

``shm`` is built in, ``reading`` reads what any of them published, and ``layout`` places tensors in a block of
bytes.
"""
