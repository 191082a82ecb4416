"""Files that are whole or refused: sealed documents, digests, locks, tensors."""
