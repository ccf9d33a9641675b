"""The devices of a replica: what of a model is on which, and how they share the denoiser's calls.

Knows neither pipelines that run nor requests.
"""
