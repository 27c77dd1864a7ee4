"""The tiny model of the demo, which the core reaches only through the hook ``grpo_models()``."""
