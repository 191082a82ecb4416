"""The drafter's network: its config, its layers, its heads."""
