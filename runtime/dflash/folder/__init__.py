"""The folder of a drafter, as servers read it."""
