"""The kernel: one loop of collect, train, sync and write, and its rules."""
