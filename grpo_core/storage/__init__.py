"""What a run keeps on the disk, and where the tokens of finished groups are."""
