"""Validation: strategies, estimates, and where they run."""
