"""Tries the tiny pipelines that diffusers tests itself with through the engine that serves them."""
