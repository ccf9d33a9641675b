"""Tries the tiny pipelines that diffusers tests itself with, through our engine."""
