"""The frozen target: its files, its outline, its weights."""
