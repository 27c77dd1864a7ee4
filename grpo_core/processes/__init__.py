"""Processes of a run: killable children, what ends them, and other interpreters."""
