"""The application: a run, and the parts of it that a configuration names."""
