"""Processes of a run: killable children, their cleanup, and other interpreters."""
