"""Packed documents: fine-tuning of a Hugging Face causal language model, every document alone."""
