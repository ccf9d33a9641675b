"""The libraries of a replica, imported once for all those that the tests start."""

from __future__ import annotations

import celery.apps.worker
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
from diffusers.pipelines import pipeline_utils

__all__ = [
    "LTXPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionPipeline",
    "apply_group_offloading",
    "attention_dispatch",
    "celery",
    "diffusers",
    "kombu",
    "peft",
    "pipeline_utils",
]
