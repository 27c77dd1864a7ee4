"""Transports of weights from the trainer to engines.

``shm`` is built in, ``reading`` reads the weights of any transport, and ``layout`` places tensors in a block
of bytes.
"""
