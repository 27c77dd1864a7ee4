"""What a run shows: its files, its terminal, its report."""
