"""Samples: answered, stored, planned into steps."""
