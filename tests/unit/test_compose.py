"""docker-compose.yml against what the service itself accepts; no container engine is needed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from configs.settings import REPOSITORY, SettingsSchema, load_settings
from configs.stages import load_stages, plan_replicas

_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


@pytest.fixture
def services() -> dict[str, Any]:
    text = (REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(_DEFAULT.sub(r"\1", text))["services"]
    return found


def test_every_planned_replica_has_a_service_on_its_own_queue(services: dict[str, Any]) -> None:
    replicas = [name for name in services if name.startswith("replica")]
    stage_file = REPOSITORY / services["replica0"]["environment"]["STAGE_CONFIGS_PATH"]

    assert replicas == [plan.name for plan in plan_replicas(load_stages(stage_file))]
    for name in replicas:
        command = services[name]["command"]
        assert command[:4] == ["celery", "-A", "workers", "worker"]
        assert command[command.index("-Q") + 1] == name
        assert f'-d "{name}@' in services[name]["healthcheck"]["test"]


def test_every_command_names_a_module_that_the_image_has(services: dict[str, Any]) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert "scripts/lab" in ignored
    for service in services.values():
        program, *arguments = service["command"]
        if program in {"gunicorn", "celery"}:
            option = "--config" if program == "gunicorn" else "-A"
            module = arguments[arguments.index(option) + 1].removeprefix("python:")
            assert find_spec(module) is not None, module
            assert module.split(".", maxsplit=1)[0] not in ignored


def test_every_variable_is_known_and_accepted(services: dict[str, Any]) -> None:
    known = {field.data_key for field in SettingsSchema().fields.values()} | {"HF_TOKEN"}
    for service in services.values():
        environment = service.get("environment", {})
        assert set(environment) <= known
        load_settings({name: value or "" for name, value in environment.items()})


def test_only_loopback_of_the_host_is_published(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]

    assert ports == ["127.0.0.1:8099:8099", "127.0.0.1:5555:5555"]


def test_redis_keeps_its_queue_on_disk(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]

    assert command[command.index("--appendonly") + 1] == "yes"
    assert services["redis"]["volumes"] == ["redis:/data"]
