"""The weight transports ``cuda_ipc`` and ``collective``: writers for trainers, readers for engines."""
