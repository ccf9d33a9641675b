"""The devices of a replica: what of a model is on which, and how they share the denoiser's calls.

Begin at ``chunk``. ``copies`` share the rows of a call; ``ranks``, which are processes, share its
sequence.
"""
