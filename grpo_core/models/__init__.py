"""Files of models: where they are, what they hold, and whether they fit together."""
