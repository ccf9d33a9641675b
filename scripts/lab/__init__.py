"""Benchmarks, training and sweeps over model families; not part of the image."""
