"""Weights on their way from the trainer to engines."""

RELAY = "relay:"
"""Begins a location that names a trainer's socket, see ``relay``."""
