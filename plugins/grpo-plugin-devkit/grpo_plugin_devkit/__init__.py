"""Commands for those who write plugins of grpo-core: ``new`` and ``try``."""
