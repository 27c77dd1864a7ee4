"""The model of the demonstration, made on the spot: the core reaches it by its name in ``grpo_models()``."""
