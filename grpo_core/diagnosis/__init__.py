"""Diagnosis of a run while it runs, which the core reaches only through ``grpo_trackers()``."""
