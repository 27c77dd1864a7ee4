"""What people call from Python: ``train``, ``validate``, and what a run has written."""
