"""The files of a run, and the storage of finished groups' tokens."""
