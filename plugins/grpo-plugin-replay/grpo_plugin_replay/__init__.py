"""The commands ``replay``, ``fork`` and ``bisect`` recompute steps of runs; ``simulate`` forecasts a run."""
