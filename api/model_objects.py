"""The schemas of models, and of whether they are served.

`api/model_presentation.py` makes the values.
"""

from __future__ import annotations

from marshmallow import Schema, fields

from api.object_fields import ListSchema, text, whole


class TakesSchema(Schema):
    """Which parameters the pipeline takes."""

    negative_prompt = fields.Boolean()
    guidance_scale = fields.Boolean()
    true_cfg_scale = fields.Boolean()
    image = fields.Boolean()
    mask_image = fields.Boolean()
    strength = fields.Boolean()
    num_frames = fields.Boolean()
    fps = fields.Boolean()
    preview = fields.Boolean()


class LimitsSchema(Schema):
    """The largest value of each parameter."""

    max_pixels = whole("Width x height of one output.")
    num_inference_steps = whole("Denoising steps.")
    num_outputs_per_prompt = whole("Outputs of one request.")
    images = whole("Input images of one request.")
    num_frames = whole("Frames of a video.", allow_none=True)
    video_pixels = whole("Width x height x frames of a video.", allow_none=True)
    prompt_characters = whole("Longer prompts are refused.")
    prompt_tokens = whole("Longer prompts are cut, with a warning.", allow_none=True)
    seed = whole("Seed of the last output.")


class ModelObjectSchema(Schema):
    """A model, as OpenAI lists it, with what it can do."""

    id = text("Its name.")
    object = text("Always `model`.")
    created = whole("When the oldest of its replicas started; 0 where none lives.")
    owned_by = text("This service.")
    ready_replicas = whole("Replicas in the rotation.")
    tasks = fields.List(fields.String())
    size_multiple = whole("Width and height are multiples of it.")
    frames_step = whole("A video has 1 frame and a multiple of it more.", allow_none=True)
    schedulers = fields.List(
        fields.String(), metadata={"description": "Noise schedulers, the model's own first."}
    )
    full_run_schedulers = fields.List(
        fields.String(),
        metadata={
            "description": "Those of them that tasks with a `strength` refuse: they begin at the "
            "first step."
        },
    )
    loras = fields.List(fields.String(), metadata={"description": "Adapters to name in `lora`."})
    output_formats = fields.List(fields.String())
    takes = fields.Nested(TakesSchema)
    limits = fields.Nested(LimitsSchema)
    defaults = fields.Dict(
        keys=fields.String(), metadata={"description": "Values of what a request leaves out."}
    )


class ModelListSchema(ListSchema):
    """Models, by name."""

    data = fields.List(fields.Nested(ModelObjectSchema))


class HealthSchema(Schema):
    """The door is up."""

    status = text("Always `ok`.")


class StageReadinessSchema(Schema):
    """A stage that can serve."""

    stage = whole("Its number.")
    model = text("Its model.")
    ready_replicas = whole("At least 1.")


class ReadinessSchema(Schema):
    """Every stage can serve."""

    status = text("Always `ready`.")
    stages = fields.List(fields.Nested(StageReadinessSchema))
