"""The Lightning contract under test: scenarios run once per world, tests read their results."""
