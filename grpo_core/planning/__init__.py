"""Forecasts of runs: the real pipeline on virtual time, with service times that are given or measured."""
