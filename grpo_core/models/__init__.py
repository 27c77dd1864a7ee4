"""Files of models: their location, their contents, and their consistency."""
