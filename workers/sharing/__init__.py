"""Calls of a denoiser: how they merge, and how those of several requests meet."""
