"""Contracts of a run, and the formulas that plugins share.  They import no other room."""
