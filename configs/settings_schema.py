"""Which values each environment variable may have.

It knows the form of a value and the words of its refusal; the defaults and the meaning stand in
`configs/settings.py`, the only user.
"""

from base64 import b64decode
from typing import ClassVar, Final

from marshmallow import EXCLUDE, Schema, ValidationError, fields, validate

from configs.field_types import Number, OneOf, Whole
from configs.redis_url import RedisUrl

_SHORTEST_SECRET: Final = 24  # bytes; as the Standard Webhooks specification has it
_YEAR_S: Final = 31_536_000
ROUTING_POLICIES: Final = ("round_robin", "least_work")
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _check_redis_url(value: str) -> None:
    try:
        RedisUrl.parse(value)
    except ValueError as refused:
        raise ValidationError(str(refused)) from None


def _check_webhook_secret(value: str) -> None:
    for secret in value.split():
        try:
            key = b64decode(secret.removeprefix("whsec_") + "==", validate=False)
        except ValueError:
            key = b""
        if not secret.startswith("whsec_") or len(key) < _SHORTEST_SECRET:
            raise ValidationError(
                f"is no key that signs: write whsec_ and at least {_SHORTEST_SECRET} bytes in "
                'base64, such as from: echo "whsec_$(openssl rand -base64 32)"'
            )


class SettingsSchema(Schema):
    """The environment to a dict with the names of `Settings`; a variable not set is left out."""

    class Meta:
        """The environment holds much that is not ours."""

        unknown: ClassVar[str] = EXCLUDE

    redis_url = fields.String(data_key="REDIS_URL", validate=_check_redis_url)
    redis_prefix = fields.String(
        data_key="REDIS_PREFIX",
        validate=validate.Regexp(
            r"[A-Za-z0-9_.:-]+\Z",
            error="has characters other than letters, digits and _ . : - ; take these out",
        ),
    )
    stage_configs_path = fields.String(data_key="STAGE_CONFIGS_PATH")
    outputs_url = fields.String(data_key="OUTPUTS_URL")
    output_metadata = fields.Boolean(
        data_key="OUTPUT_METADATA",
        error_messages={"invalid": "is neither true nor false; give one of these two words"},
    )
    retention_s = Number(1, _YEAR_S, "seconds", strict=False, data_key="RETENTION_S")
    heartbeat_s = Number(0.05, 3600, "seconds", strict=False, data_key="HEARTBEAT_S")
    heartbeat_expiry_s = Number(0.1, 86_400, "seconds", strict=False, data_key="HEARTBEAT_EXPIRY_S")
    sweep_s = Number(0.05, 3600, "seconds", strict=False, data_key="SWEEP_S")
    drain_s = Number(0, 86_400, "seconds", strict=False, data_key="DRAIN_S")
    stuck_after_s = Number(0.1, 86_400, "seconds", strict=False, data_key="STUCK_AFTER_S")
    max_attempts = Whole(1, 100, "attempts", strict=False, data_key="MAX_ATTEMPTS")
    priority_age_s = Number(1, _YEAR_S, "seconds", strict=False, data_key="PRIORITY_AGE_S")
    max_wait_s = Number(0, 3600, "seconds", strict=False, data_key="MAX_WAIT_S")
    preview_every_s = Number(0, 3600, "seconds", strict=False, data_key="PREVIEW_EVERY_S")
    routing_policy = OneOf(*ROUTING_POLICIES, data_key="ROUTING_POLICY")
    max_waiting_per_replica = Whole(
        1, 1_000_000, "requests", strict=False, data_key="MAX_WAITING_PER_REPLICA"
    )
    max_waiting_per_stage = Whole(
        1, 10_000_000, "requests", strict=False, data_key="MAX_WAITING_PER_STAGE"
    )
    max_long_polls = Whole(
        1, 10_000, "calls held at a time", strict=False, data_key="MAX_LONG_POLLS"
    )
    cpu_devices = Whole(0, 1024, "devices", strict=False, data_key="CPU_DEVICES")
    replica_offset = Whole(0, 1_000_000, "replicas", strict=False, data_key="REPLICA_OFFSET")
    api_key = fields.String(data_key="API_KEY")
    api_host = fields.String(data_key="API_HOST")
    api_port = Whole(1, 65_535, "TCP port", strict=False, data_key="API_PORT")
    api_workers = Whole(1, 1024, "processes", strict=False, data_key="API_WORKERS")
    api_threads = Whole(2, 20_000, "threads", strict=False, data_key="API_THREADS")
    max_body_bytes = Whole(1024, 1024**4, "bytes", strict=False, data_key="MAX_BODY_BYTES")
    max_prompt_chars = Whole(1, 10_000_000, "characters", strict=False, data_key="MAX_PROMPT_CHARS")
    max_pixels = Whole(1, 2**40, "pixels", strict=False, data_key="MAX_PIXELS")
    max_input_pixels = Whole(1, 2**40, "pixels", strict=False, data_key="MAX_INPUT_PIXELS")
    max_frames = Whole(1, 1_000_000, "frames", strict=False, data_key="MAX_FRAMES")
    max_video_pixels = Whole(64, 1024**4, "pixels", strict=False, data_key="MAX_VIDEO_PIXELS")
    max_steps = Whole(1, 1_000_000, "steps", strict=False, data_key="MAX_STEPS")
    max_outputs = Whole(1, 10_000, "outputs", strict=False, data_key="MAX_OUTPUTS")
    webhook_secret = fields.String(data_key="WEBHOOK_SECRET", validate=_check_webhook_secret)
    webhook_allow_private = fields.Boolean(
        data_key="WEBHOOK_ALLOW_PRIVATE",
        error_messages={"invalid": "is neither true nor false; give one of these two words"},
    )
    log_level = OneOf(*LOG_LEVELS, data_key="LOG_LEVEL")
    flower_port = Whole(1, 65_535, "TCP port", strict=False, data_key="FLOWER_PORT")
    run_dir = fields.String(data_key="RUN_DIR")
