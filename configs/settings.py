"""Settings of the service, read once from the environment."""

import os
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from marshmallow import EXCLUDE, Schema, ValidationError, fields, validate

from configs.errors import ConfigurationError, FieldError
from configs.fields import Flag, Number, OneOf, Whole, field_errors
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
    output_metadata = Flag(strict=False, data_key="OUTPUT_METADATA")
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
    webhook_allow_private = Flag(strict=False, data_key="WEBHOOK_ALLOW_PRIVATE")
    log_level = OneOf(*LOG_LEVELS, data_key="LOG_LEVEL")
    flower_port = Whole(1, 65_535, "TCP port", strict=False, data_key="FLOWER_PORT")
    run_dir = fields.String(data_key="RUN_DIR")


REPOSITORY: Final = Path(__file__).resolve().parents[1]


_MIB: Final = 1024 * 1024


_HEADING: Final = "the environment is refused"


@dataclass(frozen=True)
class Settings:
    """All settings, with their defaults; a field is read from the variable of its name in capitals.

    Names ending in `_s` are seconds. `redis_url` may hold a password, and with `api_key` it is
    kept out of the repr.

    Attributes:
        redis_url: Redis of the broker, the records and the registry.
        redis_prefix: Put before every key, so that several services can share one Redis.
        stage_configs_path: The stage file, absolute.
        outputs_url: fsspec URL of the folder in which outputs are stored.
        output_metadata: Whether prompt and parameters are written into the output files.
        retention_s: How long a record and its outputs are kept after the request has ended.
        heartbeat_s: Time between two marks of life of a replica.
        heartbeat_expiry_s: Age of the last mark at which a replica counts as dead.
        sweep_s: Time between two failover sweeps.
        drain_s: How long a stopping or drained replica works on before it hands its requests back.
        stuck_after_s: A replica in which no step moved for so long is ended, to be started anew.
        max_attempts: Crashes that a request may be in flight in before it is failed.
        priority_age_s: Waiting time after which a request is treated as one priority higher.
        max_wait_s: Longest that one call may be held by `Prefer: wait`.
        preview_every_s: Least time between two previews of a running request.
        routing_policy: How a replica is chosen: `round_robin` or `least_work`.
        max_waiting_per_replica: Requests that may wait for one replica; above that 429.
        max_waiting_per_stage: Requests that may wait for all replicas of a stage; above that 429.
        max_long_polls: Held calls and event streams at a time, for each API process.
        replica_offset: Number of this host's first replica.
        cpu_devices: CPU devices, dealt out over the cores; 0 for one on each core.
        api_key: Key that calls must bring; empty for a service open to whoever reaches it.
        api_host: Address the API listens on.
        api_port: TCP port of the API.
        api_workers: Number of API processes.
        api_threads: Threads of each API process; above `max_long_polls`.
        max_body_bytes: Largest request body, in bytes.
        max_prompt_chars: Longest prompt, in characters.
        max_pixels: Largest width x height of an output, in pixels.
        max_input_pixels: Largest width x height of an input image, in pixels.
        max_frames: Largest `num_frames` of a video.
        max_video_pixels: Largest width x height x frames of a video.
        max_steps: Largest `num_inference_steps`.
        max_outputs: Largest `num_outputs_per_prompt`.
        webhook_secret: Key that signs webhooks, `whsec_` and base64; several are for changing it.
            Empty for none: requests that ask for a webhook are refused then.
        webhook_allow_private: Whether webhooks may go to addresses that are not public.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        flower_port: TCP port of Flower.
        run_dir: Folder of the launcher: Redis data, logs, its lock; and of the outputs by default.
    """

    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    redis_prefix: str = "diffusion:"
    stage_configs_path: Path = REPOSITORY / "configs" / "tiny_cpu.yaml"
    outputs_url: str = f"file://{REPOSITORY}/.run/outputs"
    output_metadata: bool = True
    retention_s: float = 86_400.0
    heartbeat_s: float = 1.0
    heartbeat_expiry_s: float = 5.0
    sweep_s: float = 1.0
    drain_s: float = 5.0
    stuck_after_s: float = 300.0
    max_attempts: int = 3
    priority_age_s: float = 600.0
    max_wait_s: float = 60.0
    preview_every_s: float = 0.5
    routing_policy: str = "round_robin"
    max_waiting_per_replica: int = 1000
    max_waiting_per_stage: int = 10_000
    max_long_polls: int = 256
    replica_offset: int = 0
    cpu_devices: int = 0
    api_key: str = field(default="", repr=False)
    api_host: str = "127.0.0.1"
    api_port: int = 8099
    api_workers: int = 2
    api_threads: int = 320
    max_body_bytes: int = 32 * _MIB
    max_prompt_chars: int = 8192
    max_pixels: int = 4 * _MIB
    max_input_pixels: int = 32 * _MIB
    max_frames: int = 1000
    max_video_pixels: int = 128 * _MIB
    max_steps: int = 1000
    max_outputs: int = 10
    webhook_secret: str = field(default="", repr=False)
    webhook_allow_private: bool = False
    log_level: str = "INFO"
    flower_port: int = 5555
    run_dir: Path = REPOSITORY / ".run"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ`, or from the environment of this process.

    Raises:
        ConfigurationError: One or more variables hold a value that is refused; all are named.
    """
    given = _given(os.environ if environ is None else environ)
    try:
        values: dict[str, Any] = SettingsSchema().load(given)
    except ValidationError as refused:
        shown = {name: _shown(name, value) for name, value in given.items()}
        details = field_errors(refused, shown)
        raise ConfigurationError.from_details(details, _HEADING) from None
    if "stage_configs_path" in values:
        values["stage_configs_path"] = Path(values["stage_configs_path"]).expanduser().absolute()
    if "outputs_url" in values:
        values["outputs_url"] = _outputs_url(values["outputs_url"])
    if "run_dir" in values:
        values["run_dir"] = Path(values["run_dir"]).expanduser().absolute()
        values.setdefault("outputs_url", f"file://{values['run_dir']}/outputs")
    settings = Settings(**values)
    contradictions = _contradictions(settings)
    if contradictions:
        raise ConfigurationError.from_details(contradictions, _HEADING)
    return settings


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    if "LOG_LEVEL" in given:
        given["LOG_LEVEL"] = given["LOG_LEVEL"].upper()
    return given


def _outputs_url(value: str) -> str:
    """A plain path is a folder of this machine, relative to where the service was started."""
    if "://" in value:
        return value
    return f"file://{Path(value).expanduser().absolute()}"


def _shown(name: str, value: str) -> str:
    """The value as a refusal may print it: a Redis URL may hold a password."""
    if name == "WEBHOOK_SECRET":
        return "***"
    if name == "REDIS_URL" and "@" in value:
        scheme, separator, rest = value.rpartition("://")
        value = f"{scheme}{separator}***@{rest.rpartition('@')[2]}"
    if name == "REDIS_URL" and "sentinel_password" in value:
        value = value.partition("?")[0] + "?***"
    return value


def _contradictions(settings: Settings) -> list[FieldError]:
    details = []
    if settings.heartbeat_expiry_s < 2 * settings.heartbeat_s:
        details.append(
            FieldError(
                "HEARTBEAT_EXPIRY_S",
                f"{settings.heartbeat_expiry_s:g} s is below twice HEARTBEAT_S "
                f"({settings.heartbeat_s:g} s), so that one late mark would count as a death; "
                f"give at least {2 * settings.heartbeat_s:g}",
            )
        )
    if settings.api_threads <= settings.max_long_polls:
        details.append(
            FieldError(
                "API_THREADS",
                f"{settings.api_threads} threads are not more than MAX_LONG_POLLS "
                f"({settings.max_long_polls}), so that held calls could take every thread; "
                f"give at least {settings.max_long_polls + 1}, or lower MAX_LONG_POLLS",
            )
        )
    return details
