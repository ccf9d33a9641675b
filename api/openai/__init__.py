"""The calls of OpenAI's API, each made into one native request: images, chat and videos.

Field names, limits and answers are those of OpenAI and, for what diffusion needs beyond them, of
vLLM-Omni. Checks, errors and records are the native ones.
"""
