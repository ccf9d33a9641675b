"""Where everything is once the service runs, as the launcher tells it at the end of the start.

Does not know processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.stages import ReplicaPlan


def addresses(
    api: str,
    flower: str,
    logs: Path,
    plans: Sequence[ReplicaPlan],
    failed: Sequence[str],
    *,
    asks_for_key: bool,
) -> str:
    """Return the block that ends the start: what is served and where, and a call to try.

    Args:
        api: URL of the API.
        flower: URL of Flower.
        logs: Folder of the parts' logs.
        plans: The replicas.
        failed: Names of the parts that are not ready.
        asks_for_key: Whether calls must bring the key.
    """
    models = ", ".join(dict.fromkeys(plan.stage.model_name for plan in plans))
    count = f"{len(plans)} replica{'' if len(plans) == 1 else 's'}"
    state = f", not ready: {', '.join(failed)}" if failed else ""
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key else ""
    return f"""
Diffusion Replicas: {models} on {count}{state}
  page    {api}/
  API     {api}/v1/requests
  docs    {api}/docs
  Flower  {flower}/
  logs    {logs}

Try it:
  curl -s {api}/v1/requests{key} -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
    -d '{{"prompt": "a large red circle on a blue background"}}'

Ctrl-C stops everything."""
