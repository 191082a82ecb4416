"""DFlash: drafter, objective, decoding, and the folder that servers read."""
