"""The text-to-image families whose pipelines run without an engine in the tests."""

from scripts.families.catalog import FAMILIES as ALL
from scripts.families.catalog import save_family

__all__ = ["FAMILIES", "save_family"]

FAMILIES = {
    name: ALL[name]
    for name in ("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "flux", "pixart")
}
