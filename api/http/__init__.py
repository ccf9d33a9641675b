"""What is common to the calls: bodies, fields, headers, server-sent events."""
