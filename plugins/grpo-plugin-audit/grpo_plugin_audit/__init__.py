"""Audits of rewards, and new judgements of stored rollouts."""
