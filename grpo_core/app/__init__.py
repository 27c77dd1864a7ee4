"""The application: a run and the parts that its configuration names."""
