"""Where prompts come from, and which come next."""
