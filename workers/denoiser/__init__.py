"""Calls of a denoiser: what they are like, how they merge, and how those of several requests meet.

Knows neither pipelines nor devices.
"""
