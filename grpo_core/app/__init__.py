"""The application: commands, and the parts of a run that a configuration names."""
