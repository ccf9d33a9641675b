"""Settings: defaults, what is read, and the refusal of every variable's wrong values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigurationError
from configs.settings import REPOSITORY, Settings, SettingsSchema, load_settings

NUMBERS = {
    "RETENTION_S": ("60", 60.0),
    "HEARTBEAT_S": ("0.5", 0.5),
    "HEARTBEAT_EXPIRY_S": ("9", 9.0),
    "SWEEP_S": ("2", 2.0),
    "DRAIN_S": ("0", 0.0),
    "STUCK_AFTER_S": ("40", 40.0),
    "MAX_ATTEMPTS": ("5", 5),
    "PRIORITY_AGE_S": ("30", 30.0),
    "MAX_WAIT_S": ("10", 10.0),
    "PREVIEW_EVERY_S": ("2", 2.0),
    "MAX_WAITING_PER_REPLICA": ("7", 7),
    "MAX_WAITING_PER_STAGE": ("70", 70),
    "MAX_LONG_POLLS": ("8", 8),
    "AFFINITY_PATIENCE_S": ("5", 5.0),
    "MAX_OVERTAKEN": ("3", 3),
    "SIGNED_URL_S": ("60", 60.0),
    "REPLICA_OFFSET": ("4", 4),
    "CPU_DEVICES": ("8", 8),
    "API_PORT": ("80", 80),
    "API_WORKERS": ("3", 3),
    "API_THREADS": ("400", 400),
    "MAX_BODY_BYTES": ("2048", 2048),
    "MAX_PROMPT_CHARS": ("100", 100),
    "MAX_PIXELS": ("4096", 4096),
    "MAX_INPUT_PIXELS": ("8192", 8192),
    "MAX_FRAMES": ("81", 81),
    "MAX_VIDEO_PIXELS": ("65536", 65536),
    "MAX_STEPS": ("50", 50),
    "MAX_OUTPUTS": ("2", 2),
    "FLOWER_PORT": ("5556", 5556),
}
TEXTS = {
    "REDIS_URL": ("rediss://redis.example:6380/2", "rediss://redis.example:6380/2"),
    "REDIS_PREFIX": ("mine:", "mine:"),
    "OUTPUTS_URL": ("s3://bucket/outputs", "s3://bucket/outputs"),
    "STAGE_CONFIGS_PATH": ("/etc/stages.yaml", Path("/etc/stages.yaml")),
    "OUTPUT_METADATA": ("false", False),
    "ROUTING_POLICY": ("least_work", "least_work"),
    "API_KEY": ("s3cret", "s3cret"),
    "WEBHOOK_SECRET": ("whsec_" + "QUJD" * 8, "whsec_" + "QUJD" * 8),
    "WEBHOOK_ALLOW_PRIVATE": ("true", True),
    "API_HOST": ("0.0.0.0", "0.0.0.0"),
    "RUN_DIR": ("/var/run/replicas", Path("/var/run/replicas")),
    "LOG_LEVEL": ("debug", "DEBUG"),
}


def refused(**environ: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environ)
    return caught.value


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = load_settings({})
    assert settings == Settings()
    assert settings.stage_configs_path == REPOSITORY / "configs" / "tiny_cpu.yaml"
    assert settings.stage_configs_path.is_file()
    assert settings.outputs_url == f"file://{REPOSITORY}/.run/outputs"


def test_the_defaults_would_be_accepted_if_they_were_given() -> None:
    defaults = dataclasses.asdict(Settings())
    environ = {name.upper(): str(value) for name, value in defaults.items()}
    assert load_settings(environ) == Settings()


def test_every_setting_has_a_variable_of_its_name_and_a_line_of_documentation() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    variables = {field.data_key for field in SettingsSchema().fields.values()}
    assert variables == {name.upper() for name in names}
    assert variables == set(NUMBERS) | set(TEXTS)
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert {name for name in variables if f"`{name}`" not in page} == set()
    assert {name for name in names if f"        {name}: " not in (Settings.__doc__ or "")} == set()


@pytest.mark.parametrize(("name", "text", "value"), [(n, *v) for n, v in NUMBERS.items()])
def test_a_number_is_read(name: str, text: str, value: float) -> None:
    assert getattr(load_settings({name: text}), name.lower()) == value


@pytest.mark.parametrize(("name", "text", "value"), [(n, *v) for n, v in TEXTS.items()])
def test_a_text_is_read(name: str, text: str, value: object) -> None:
    assert getattr(load_settings({name: text}), name.lower()) == value


@pytest.mark.parametrize("name", [*NUMBERS, *TEXTS])
def test_a_variable_set_to_nothing_counts_as_not_set(name: str) -> None:
    assert load_settings({name: "  "}) == Settings()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["many", "-1", "nan", "inf", "1e400", "0x10", "9" * 5000])
def test_a_wrong_number_is_refused_by_name_value_and_fix(name: str, text: str) -> None:
    error = refused(**{name: text})
    assert error.param == name
    assert f"{name}: '{text[:20]}" in error.message
    assert "; give a " in error.message
    assert " from " in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "API_PORT",
            "99999",
            "API_PORT: '99999' is out of range; give a whole number from 1 to 65535 (TCP port)",
        ),
        ("API_WORKERS", "1.5", "'1.5' is not a whole number; give a whole number from 1 to 1024"),
        ("OUTPUT_METADATA", "perhaps", "'perhaps' is not a boolean; use true or false"),
        ("ROUTING_POLICY", "random", "use round_robin or least_work"),
        ("LOG_LEVEL", "loud", "use DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        ("REDIS_PREFIX", "a b", "'a b' has characters other than letters, digits and _ . : -"),
        ("REDIS_URL", "http://h", "is not a redis://, rediss://, unix:// or sentinel:// URL; give"),
        ("REDIS_URL", "127.0.0.1:6379", "give one such as redis://127.0.0.1:6379/0"),
        ("REDIS_URL", "redis://h:70000/0", "names no host and port"),
        ("REDIS_URL", "redis://", "names no host"),
        ("REDIS_URL", "redis://h/zero", "'zero' for the number of the database"),
        (
            "REDIS_URL",
            "redis://h/0?ssl_ca_certs=a",
            "which redis:// lacks; remove it",
        ),
        ("REDIS_URL", "rediss://h?ssl_cert_reqs=no", "use one of required, optional, none"),
        ("REDIS_URL", "unix://", "names no socket"),
        ("REDIS_URL", "sentinel://a:1,b:2/0", "names no master; add ?master="),
        ("REDIS_URL", "sentinel://a:1,:2/0?master=m", "names no host and port"),
        (
            "WEBHOOK_SECRET",
            "whsec_QUJD",
            "'***' is not a signing key; write whsec_ and at least 24",
        ),
        ("WEBHOOK_SECRET", "QUJD" * 8, "openssl rand -base64 32"),
        ("WEBHOOK_ALLOW_PRIVATE", "perhaps", "is not a boolean"),
    ],
)
def test_the_words_of_a_refusal(name: str, text: str, expected: str) -> None:
    assert expected in refused(**{name: text}).message


def test_a_password_is_shown_neither_in_a_refusal_nor_in_the_repr() -> None:
    assert "hunter2" not in refused(REDIS_URL="http://me:hunter2@h:1/0").message
    assert "hunter2" not in refused(REDIS_URL="redis://:hunter2@h:99999/0").message
    query = "?sentinel_password=hunter2"
    assert "hunter2" not in refused(REDIS_URL=f"sentinel://h:1/0{query}").message
    assert "hunter2" not in refused(WEBHOOK_SECRET="hunter2").message
    assert "hunter2" not in repr(load_settings({"REDIS_URL": "redis://:hunter2@h:1/0"}))


def test_all_wrong_variables_are_refused_at_once() -> None:
    error = refused(API_PORT="x", LOG_LEVEL="loud", MAX_STEPS="0")
    assert error.param is None
    assert {detail.param for detail in error.details} == {"API_PORT", "LOG_LEVEL", "MAX_STEPS"}
    assert "(3 errors)" in error.message


def test_an_expiry_below_two_heartbeats_is_refused() -> None:
    message = refused(HEARTBEAT_S="4").message
    assert "HEARTBEAT_EXPIRY_S: 5 s is below twice HEARTBEAT_S (4 s)" in message
    assert "give at least 8" in message


def test_threads_that_held_calls_could_all_take_are_refused() -> None:
    message = refused(API_THREADS="256").message
    assert "API_THREADS: 256 threads are not more than MAX_LONG_POLLS (256)" in message
    assert "give at least 257, or lower MAX_LONG_POLLS" in message


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"STAGE_CONFIGS_PATH": "my.yaml", "OUTPUTS_URL": "out"})
    assert settings.stage_configs_path == tmp_path / "my.yaml"
    assert settings.outputs_url == f"file://{tmp_path}/out"


def test_outputs_lie_in_the_run_folder_unless_said_otherwise() -> None:
    assert load_settings({"RUN_DIR": "/r"}).outputs_url == "file:///r/outputs"
    assert load_settings({"RUN_DIR": "/r", "OUTPUTS_URL": "/o"}).outputs_url == "file:///o"


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_STEPS", "77")
    assert load_settings().max_steps == 77


@given(st.dictionaries(st.sampled_from([*NUMBERS, *TEXTS]), st.text(max_size=30)))
def test_any_text_is_read_or_refused_by_name(environ: dict[str, str]) -> None:
    try:
        load_settings(environ)
    except ConfigurationError as error:
        names = {detail.param for detail in error.details}
        assert names
        assert names <= set(environ) | {"HEARTBEAT_EXPIRY_S", "API_THREADS"}
