"""Devices, processes and what they do together."""
