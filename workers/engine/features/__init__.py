"""What an engine can do beside running a pipeline, each behind its hooks."""
