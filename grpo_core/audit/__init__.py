"""The audit of an environment: whether its rewards mean anything."""
