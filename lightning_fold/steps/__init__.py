"""The user's steps under pipelines: one Lightning batch as many microbatches on many stages."""
