"""The calls for requests: submit, follow, change, cancel, fetch."""
