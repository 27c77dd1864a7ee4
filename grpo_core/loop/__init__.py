"""The kernel: the one loop of collect, train, sync and write, and the rules that it keeps."""
