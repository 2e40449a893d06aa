"""Pure sampling strategies: one file each."""
