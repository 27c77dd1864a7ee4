"""Several engines that act as one."""
