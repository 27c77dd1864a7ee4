"""The transports ``cuda_ipc`` and ``collective``: writers for the trainer and readers for engines."""
