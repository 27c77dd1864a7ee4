"""Explains what is wrong with a run, from its files: ``grpo-core explain RUN``."""
