"""Agents that talk to the model by themselves, over HTTP: what they sample is recorded token by token."""
