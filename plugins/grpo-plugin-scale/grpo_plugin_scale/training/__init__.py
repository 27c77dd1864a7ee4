"""The trainer ``torch`` with what a larger model or more GPUs need."""
