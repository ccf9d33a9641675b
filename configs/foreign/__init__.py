"""Stage files in other words than ours: their dialects, their keys, and models of other kinds."""
