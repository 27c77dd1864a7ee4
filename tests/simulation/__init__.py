"""The simulation: the real pipeline, checkpoints and validation on a virtual clock, with faults."""
