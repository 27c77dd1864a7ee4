"""Validation: strategies, estimates and engines."""
