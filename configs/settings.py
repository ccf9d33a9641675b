"""Settings of the service, read once from the environment."""

import os
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from marshmallow import EXCLUDE, Schema, ValidationError, fields, validate

from configs.errors import ConfigurationError, FieldError
from configs.fields import Flag, Number, OneOf, Whole, field_errors, readers
from configs.redis_url import RedisUrl

_SHORTEST_SECRET: Final = 24  # bytes; as the Standard Webhooks specification has it
_YEAR_S: Final = 31_536_000
ROUTING_POLICIES: Final = ("round_robin", "least_work")
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _seconds(low: float, high: float) -> Number:
    return Number(low, high, "seconds", strict=False)


def _whole(low: int, high: int, unit: str) -> Whole:
    return Whole(low, high, unit, strict=False)


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
                f"is not a signing key; write whsec_ and at least {_SHORTEST_SECRET} bytes in "
                'base64, as made by: echo "whsec_$(openssl rand -base64 32)"'
            )


class _AbsolutePath(fields.Field[Path]):
    """A path, relative to where the service was started."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> Path:
        return Path(value).expanduser().absolute()


class _FolderUrl(fields.Field[str]):
    """A URL; a plain path is a folder here, relative to where the service was started."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> str:
        return value if "://" in value else f"file://{Path(value).expanduser().absolute()}"


class _LogLevel(OneOf):
    def _deserialize(self, value: Any, *rest: Any, **more: Any) -> str:
        return super()._deserialize(value.upper(), *rest, **more)


_REDIS_URL: Final = fields.String(validate=_check_redis_url)
_WEBHOOK_SECRET: Final = fields.String(validate=_check_webhook_secret)
_PREFIX: Final = fields.String(
    validate=validate.Regexp(
        r"[A-Za-z0-9_.:-]+\Z",
        error="has characters other than letters, digits and _ . : - ; remove them",
    )
)
REPOSITORY: Final = Path(__file__).resolve().parents[1]
_MIB: Final = 1024 * 1024
_HEADING: Final = "the environment is refused"


@dataclass(frozen=True)
class Settings:
    """All settings, with their defaults; each is read from the variable of its name in capitals.

    Names ending in `_s` are seconds. `redis_url` may hold a password, and with `api_key` it is
    kept out of the repr.

    Attributes:
        redis_url: Redis of the broker, the records and the registry.
        redis_prefix: Put before every key, so that several services can share one Redis.
        stage_configs_path: The stage file, absolute.
        outputs_url: fsspec URL of the folder in which outputs are stored.
        output_metadata: Whether prompt and parameters are written into the output files.
        retention_s: How long a record and its outputs are kept after the request has ended.
        heartbeat_s: Time between two heartbeats of a replica.
        heartbeat_expiry_s: Age of the last heartbeat at which a replica counts as dead.
        sweep_s: Time between two failover sweeps.
        drain_s: How long a stopping or drained replica works on before it hands its requests back.
        stuck_after_s: A replica in which no step moved for so long is ended, to be started anew.
        max_attempts: Crashes that a request may be in flight in before it is failed.
        priority_age_s: Waiting time after which a request is treated as one priority higher.
        max_wait_s: Longest that one call may be held by `Prefer: wait`.
        preview_every_s: Least time between two previews of a running request.
        routing_policy: How a replica is chosen: `round_robin` or `least_work`.
        affinity_patience_s: Waiting time after which any idle replica may take a request that has
            an `affinity_key`.
        max_overtaken: Times that a waiting request may be overtaken by others which can share steps
            with what runs; 0 for none.
        max_waiting_per_replica: Requests that may wait for one replica; above that 429.
        max_waiting_per_stage: Requests that may wait for all replicas of a stage; above that 429.
        max_long_polls: Held calls and event streams at a time, for each API process.
        replica_offset: Number of this host's first replica.
        cpu_devices: CPU devices, spread over the cores; 0 for one on each core.
        api_key: Key that calls must bring; empty for a service open to whoever reaches it.
        signed_url_s: How long an address of `response_format: url` opens without the key.
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

    redis_url: Annotated[str, fields.String(validate=_check_redis_url)] = field(
        default="redis://127.0.0.1:6379/0", repr=False
    )
    redis_prefix: Annotated[str, _PREFIX] = "diffusion:"
    stage_configs_path: Annotated[Path, _AbsolutePath()] = REPOSITORY / "configs" / "tiny_cpu.yaml"
    outputs_url: Annotated[str, _FolderUrl()] = f"file://{REPOSITORY}/.run/outputs"
    output_metadata: Annotated[bool, Flag(strict=False)] = True
    retention_s: Annotated[float, _seconds(1, _YEAR_S)] = 86_400.0
    heartbeat_s: Annotated[float, _seconds(0.05, 3600)] = 1.0
    heartbeat_expiry_s: Annotated[float, _seconds(0.1, 86_400)] = 5.0
    sweep_s: Annotated[float, _seconds(0.05, 3600)] = 1.0
    drain_s: Annotated[float, _seconds(0, 86_400)] = 5.0
    stuck_after_s: Annotated[float, _seconds(0.1, 86_400)] = 300.0
    max_attempts: Annotated[int, _whole(1, 100, "attempts")] = 3
    priority_age_s: Annotated[float, _seconds(1, _YEAR_S)] = 600.0
    max_wait_s: Annotated[float, _seconds(0, 3600)] = 60.0
    preview_every_s: Annotated[float, _seconds(0, 3600)] = 0.5
    routing_policy: Annotated[str, OneOf(*ROUTING_POLICIES)] = "round_robin"
    affinity_patience_s: Annotated[float, _seconds(0, _YEAR_S)] = 10.0
    max_overtaken: Annotated[int, _whole(0, 1_000_000, "times")] = 8
    max_waiting_per_replica: Annotated[int, _whole(1, 1_000_000, "requests")] = 1000
    max_waiting_per_stage: Annotated[int, _whole(1, 10_000_000, "requests")] = 10_000
    max_long_polls: Annotated[int, _whole(1, 10_000, "calls")] = 256
    replica_offset: Annotated[int, _whole(0, 1_000_000, "replicas")] = 0
    cpu_devices: Annotated[int, _whole(0, 1024, "devices")] = 0
    api_key: Annotated[str, fields.String()] = field(default="", repr=False)
    signed_url_s: Annotated[float, _seconds(1, _YEAR_S)] = 3600.0
    api_host: Annotated[str, fields.String()] = "127.0.0.1"
    api_port: Annotated[int, _whole(1, 65_535, "TCP port")] = 8099
    api_workers: Annotated[int, _whole(1, 1024, "processes")] = 2
    api_threads: Annotated[int, _whole(2, 20_000, "threads")] = 320
    max_body_bytes: Annotated[int, _whole(1024, 1024**4, "bytes")] = 32 * _MIB
    max_prompt_chars: Annotated[int, _whole(1, 10_000_000, "characters")] = 8192
    max_pixels: Annotated[int, _whole(1, 2**40, "pixels")] = 4 * _MIB
    max_input_pixels: Annotated[int, _whole(1, 2**40, "pixels")] = 32 * _MIB
    max_frames: Annotated[int, _whole(1, 1_000_000, "frames")] = 1000
    max_video_pixels: Annotated[int, _whole(64, 1024**4, "pixels")] = 128 * _MIB
    max_steps: Annotated[int, _whole(1, 1_000_000, "steps")] = 1000
    max_outputs: Annotated[int, _whole(1, 10_000, "outputs")] = 10
    webhook_secret: Annotated[str, _WEBHOOK_SECRET] = field(default="", repr=False)
    webhook_allow_private: Annotated[bool, Flag(strict=False)] = False
    log_level: Annotated[str, _LogLevel(*LOG_LEVELS)] = "INFO"
    flower_port: Annotated[int, _whole(1, 65_535, "TCP port")] = 5555
    run_dir: Annotated[Path, _AbsolutePath()] = REPOSITORY / ".run"


class SettingsSchema(Schema):
    """The environment to a dict with the names of `Settings`; a variable not set is left out."""

    class Meta:
        unknown: ClassVar[str] = EXCLUDE  # the environment holds much that is not ours
        include = readers(Settings)

    def on_bind_field(self, field_name: str, field_obj: fields.Field[Any]) -> None:
        """Read each field from the variable of its name in capitals."""
        field_obj.data_key = field_name.upper()


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ`, or from the environment of this process.

    Raises:
        ConfigurationError: One or more variables hold a value that is refused; all are named.
    """
    environ = os.environ if environ is None else environ
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    try:
        values: dict[str, Any] = SettingsSchema().load(given)
    except ValidationError as refused:
        shown = {name: _shown(name, value) for name, value in given.items()}
        details = field_errors(refused, shown)
        raise ConfigurationError.from_details(details, _HEADING) from None
    if "run_dir" in values:
        values.setdefault("outputs_url", f"file://{values['run_dir']}/outputs")
    settings = Settings(**values)
    contradictions = _contradictions(settings)
    if contradictions:
        raise ConfigurationError.from_details(contradictions, _HEADING)
    return settings


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
                f"({settings.heartbeat_s:g} s), so that one late heartbeat would count as a death; "
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
