"""Plugins: finds, checks and loads them, and lists their offers."""
