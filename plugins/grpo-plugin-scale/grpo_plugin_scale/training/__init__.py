"""The trainer ``torch`` with sharding, offloading and LoRA."""
