"""Environments: their processes, their calls, and the tools of models."""
