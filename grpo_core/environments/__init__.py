"""Environments: their processes, and what judges and tools are asked."""
