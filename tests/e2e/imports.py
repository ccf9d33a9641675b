"""The libraries of a replica, imported once for all those that the tests start, and their tables.

What a library makes of its sources at the first use, whatever is asked of it, is made here too.
"""

from __future__ import annotations

import celery.apps.worker
import celery.bin.celery
import celery.bin.worker
import celery.concurrency.thread
import celery.worker.autoscale
import celery.worker.consumer
import diffusers
import kombu.transport.redis
import peft
from diffusers import LTXPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from diffusers.hooks import apply_group_offloading
from diffusers.models import attention_dispatch
from diffusers.pipelines import auto_pipeline, pipeline_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from configs.known_models import known_models

__all__ = [
    "LTXPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionPipeline",
    "apply_group_offloading",
    "attention_dispatch",
    "auto_pipeline",
    "celery",
    "diffusers",
    "kombu",
    "peft",
    "pipeline_utils",
]

get_checkpoint_conversion_mapping("clip")
known_models()
