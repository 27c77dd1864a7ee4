"""Holds the commands of ``grpo-core``: each is a module, beside what several of them share."""
