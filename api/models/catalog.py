"""The catalog: which models a client may name, and what each of them can do.

A model is served when this host's stage file names it or a living replica has it; what it can do is
known once a replica has loaded it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import FieldError, InvalidRequest, NoReadyReplica
from configs.fields import choices
from configs.parameters import Abilities
from configs.stage_config import StageConfig
from routing.replica import LoadedModel, Registry, ReplicaState, not_ready


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some replica has loaded.

    Attributes:
        name: As clients are shown it.
        stage: Stage whose replicas serve it.
        abilities: What it can do, with the defaults that depend on the pipeline.
        defaults: The stage file's own defaults, by parameter name.
    """

    name: str
    stage: int
    abilities: Abilities
    defaults: Mapping[str, Any]
    aliases: tuple[str, ...] = ()


class Catalog:
    """Looks models up, in the stage file and in the registry."""

    def __init__(self, stages: Sequence[StageConfig], registry: Registry) -> None:
        """Take the stages of this host's stage file and the registry of all hosts."""
        self._stages = {stage.model_name: stage for stage in stages}
        self._aliases = {
            alias: stage.model_name for stage in stages for alias in stage.model_names[1:]
        }
        self._registry = registry

    def shown_name(self, name: str) -> str:
        """Return the name that is shown of the model which `name` means; others as they are.

        Names of this host's stage file go before those of other hosts, and names before aliases.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        if name in self._stages:
            return name
        if name in self._aliases:
            return self._aliases[name]
        return _without_alias(name, self._registry.models())

    def loaded(self) -> dict[str, ServedModel]:
        """Return the models that can be asked for, by name.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        published = self._registry.models()
        # What the registry keeps of an earlier stage file must not be offered any more.
        living = set(self._stages)
        if not living.issuperset(published):
            living |= {
                replica.heartbeat.model
                for replica in self._registry.all()
                if replica.state is not ReplicaState.GONE
            }
        return {
            name: ServedModel(
                name, model.stage, model.abilities, self._defaults(name), model.aliases
            )
            for name, model in published.items()
            if name in living
        }

    def named(self, name: str) -> ServedModel | None:
        """Return the model of that name, or alias, that can be asked for; None for others.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        return self.loaded().get(self.shown_name(name))

    def find(self, name: str | None) -> ServedModel:
        """Return the model of that name, or alias; None means the only one there is.

        Raises:
            InvalidRequest: There is no such model, or none is named and there are several.
            NoReadyReplica: No replica has ever loaded it.
            redis.RedisError: Redis did not answer.
        """
        published = self._registry.models()
        if name is None and len(self._stages) == 1 and self._stages.keys() >= published.keys():
            (name,) = self._stages
        if name is not None and name not in self._stages:
            name = self._aliases.get(name) or _without_alias(name, published)
        if name in self._stages and name in published:
            # Whatever the registry knows besides, this one is in the stage file.
            model, defaults = published[name], self._stages[name].default_sampling_params
            return ServedModel(name, model.stage, model.abilities, defaults, model.aliases)
        loaded = self.loaded()
        known = sorted({*loaded, *self._stages})
        if name is None:
            if len(known) > 1:
                raise _wrong(f"is missing and there are several; use {choices(known)}")
            name = known[0]
        if name in loaded:
            return loaded[name]
        if name not in known:
            raise _wrong(f"{name[:80]!r} is not available; use {choices(known)}")
        stage = self._stages[name].stage_id
        why = not_ready(stage, name, self._registry.all())
        raise NoReadyReplica(
            f"No replica has loaded {name!r} yet: {why}; see GET /v1/replicas.",
            retry_after=5.0,
        )

    def _defaults(self, name: str) -> Mapping[str, Any]:
        stage = self._stages.get(name)
        return stage.default_sampling_params if stage else {}


def _without_alias(name: str, published: Mapping[str, LoadedModel]) -> str:
    if name in published:
        return name
    return next((shown for shown, model in published.items() if name in model.aliases), name)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest.from_details([FieldError("model", message)])
