"""Tools for authors of plugins: the commands ``new``, ``check`` and ``try``, and contracts as tests."""
