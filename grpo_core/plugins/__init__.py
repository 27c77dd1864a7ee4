"""Plugins: found, checked, loaded, asked for what they offer."""
