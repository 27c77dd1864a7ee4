"""The output of a run: its files, its terminal view and its report."""
