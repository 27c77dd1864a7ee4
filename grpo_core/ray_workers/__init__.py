"""Engines and environments in Ray workers: actors on the machines of a cluster, or of this one alone.

Nothing here decides who gets what: ``grpo_core.engines.pool`` and ``grpo_core.environments.pool`` do.
"""
