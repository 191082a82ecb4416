"""Draft and verify: answers, and what an evaluation makes of them."""
