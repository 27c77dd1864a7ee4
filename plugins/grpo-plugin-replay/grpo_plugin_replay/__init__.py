"""The commands ``replay``, ``fork`` and ``bisect`` compute a run again; ``simulate`` forecasts one."""
