"""``grpo-core explain RUN``: finds causes of a run's problems in its files."""
