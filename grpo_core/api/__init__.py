"""The functions that people call from Python: ``train``, ``validate``, and a run as an object."""
