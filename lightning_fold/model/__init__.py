"""Models: find the parts of the user's model, fold its experts, shard its attention; the built-in decoder."""
