"""Sources, loaders and samplers of prompts."""
