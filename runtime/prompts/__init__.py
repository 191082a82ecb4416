"""Prompt files into tokens: records, conversations, templates, what is supervised."""
