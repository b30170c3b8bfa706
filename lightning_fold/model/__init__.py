"""Models: find the parts of a user's model and fold it; the built-in decoder."""
