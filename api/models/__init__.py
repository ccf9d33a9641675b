"""The calls for models: what is served, and what each model supports."""
