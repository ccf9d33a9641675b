"""One command: ``python -m scripts.serve [MODEL] --stage-configs-path FILE --port 8099``.

Checks everything first, then runs Redis (unless ``REDIS_URL`` is set), one worker for each replica,
the API and Flower; says when each is ready, starts again what ends, stops all of it on Ctrl-C.

Exit codes: 0, stopped as asked; 1, this machine or the network lacks something; 2, the command line
or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from configs.errors import ConfigurationError
from configs.settings import Settings, load_settings
from scripts.api_client import complain, say
from scripts.launcher.preflight import StartRefused, check_ports, check_stages, is_loopback
from scripts.launcher.redis_server import plan_redis
from scripts.launcher.run_folder import RunFolder
from scripts.launcher.service import run_service
from scripts.launcher.supervisor import StopSignals


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit code."""
    options = _parser().parse_args(arguments)
    stop = StopSignals()
    try:
        _serve(_settings(options), options.model, _alone(options), stop)
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    except StartRefused as refused:
        complain(str(refused))
        return 1
    return 0


def _serve(settings: Settings, model: str | None, alone: bool, stop: StopSignals) -> None:
    planned = check_stages(settings, model, os.environ, alone=alone)
    folder = RunFolder(settings.run_dir)
    folder.lock()
    check_ports(settings)
    redis = None if os.environ.get("REDIS_URL", "").strip() else plan_redis(folder.redis)
    folder.rotate_logs()
    source = planned.said or str(settings.stage_configs_path)
    in_force = replace(
        settings,
        redis_url=redis.url if redis else settings.redis_url,
        stage_configs_path=folder.write_stages(planned.document, planned.stages, source),
    )
    if planned.said:
        say(f"{planned.said}; write {in_force.stage_configs_path} into a file to change it")
    if not settings.api_key and not is_loopback(settings.api_host):
        say(
            f"Warning: the API listens on {settings.api_host} and asks for no key; anyone who "
            "can reach it can use it. Set API_KEY, or leave out --host."
        )
    run_service(in_force, planned.plans, folder, redis, stop)


def _settings(options: argparse.Namespace) -> Settings:
    """The environment, overridden by the options of the command line, which are checked alike."""
    given = {
        "STAGE_CONFIGS_PATH": options.stage_configs_path,
        "API_HOST": options.host,
        "API_PORT": options.port,
    }
    over = {name: value for name, value in given.items() if value is not None}
    return load_settings({**os.environ, **over})


def _alone(options: argparse.Namespace) -> bool:
    """Whether a model was given and no stage file."""
    named = options.stage_configs_path or os.environ.get("STAGE_CONFIGS_PATH", "").strip()
    return options.model is not None and not named


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serve",
        description="Serve diffusion pipelines from several replicas on this host.",
        epilog="Further settings are environment variables; docs/configuration.md lists them.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="diffusers folder or hub id, in place of the one in the stage file; without such a "
        "file on all GPUs, with as many replicas as they hold",
    )
    parser.add_argument(
        "--stage-configs-path",
        metavar="FILE",
        help="the stage file: models, replicas and devices (default: the bundled tiny model)",
    )
    parser.add_argument("--host", help="address the API listens on (default: 127.0.0.1)")
    parser.add_argument("--port", help="TCP port of the API (default: 8099)")
    # So that the reference's command line can be pasted.
    parser.add_argument("--omni", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
