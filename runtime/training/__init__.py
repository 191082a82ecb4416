"""A run: its threads, its folder, its checkpoints."""
