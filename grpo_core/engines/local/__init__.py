"""The default engine: a decoder for CPUs and one GPU."""
