"""Tests whether the rewards of an environment mean anything, and judges stored rollouts again."""
