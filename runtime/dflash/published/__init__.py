"""The keys of a published drafter's config.json: which are read, and what they say."""
