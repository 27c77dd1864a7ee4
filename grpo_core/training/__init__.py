"""The trainer: its process, the model as it sees it, and what it computes."""
