"""Why a pipeline could not be loaded, in one line with what to do."""

import errno
from collections.abc import Mapping
from typing import Any, Final

import diffusers
import huggingface_hub
import torch
from huggingface_hub import errors as hub

from configs.errors import ModelLoadFailed
from workers.failures import is_out_of_memory, short_cause

_OWN_CODE: Final = "only pipelines of diffusers itself are served; save the model as one"
_OTHER_VERSION: Final = "the class may need another version of diffusers than {diffusers}"
_DAMAGED: Final = "it is damaged; download or copy the model again"
_NETWORK: Final = "check the network, or give the path of a folder"

# Signs in the text of a failure or of its cause, the fix, and whether it stays until a person
# fixes it. The first that is there counts.
_BY_TEXT: Final = (
    ("not one of the libraries", "only parts from diffusers and transformers are served", True),
    ("custom code", _OWN_CODE, True),
    ("attribute name must be string", _OWN_CODE, True),
    (
        "such modeling files are",
        "leave engine_args.variant out, or name one that the model has",
        True,
    ),
    ("diffusers has no attribute", _OTHER_VERSION, True),
    ("has no class", _OTHER_VERSION, True),
    ("not fully cached", _NETWORK, False),
    ("timed out", _NETWORK, False),
    ("connecterror", _NETWORK, False),
    ("connection", _NETWORK, False),
    ("unable to load weights", _DAMAGED, False),
    ("safetensorerror", _DAMAGED, False),
    ("not a valid json", _DAMAGED, False),
    ("no file named", "a file of the model is missing; download or copy the model again", False),
    ("were passed", "a part that the pipeline needs is missing from model_index.json", True),
    ("expected shape", "the weights do not belong to the configuration beside them", False),
)


def explain(model: str, error: Exception) -> ModelLoadFailed:
    """Return the error of the service for what loading `model`, a folder or a hub id, raised."""
    if isinstance(error, ModelLoadFailed):
        return error
    for each in (error, error.__cause__):
        told = each if isinstance(each, OSError) else None
        if told is not None and (found := _of_hub_or_disk(told)) is not None:
            what, lasting = found
            return ModelLoadFailed(f"{model}: {what}", lasting=lasting)
    cause = short_cause(error)
    if error.__cause__ is not None:
        cause = f"{cause} ({short_cause(error.__cause__)})"
    if is_out_of_memory(error):
        return ModelLoadFailed(f"{model}: too little memory to load it: {cause}; {_ways(error)}")
    if isinstance(error, ImportError):
        what = f"a library is missing: {cause}; install it"
        return ModelLoadFailed(f"{model}: {what}", lasting=True)
    if isinstance(error, NameError):  # diffusers leaves out what it cannot import
        what = "a library that this pipeline needs is missing; OmniGen and Cosmos need torchvision"
        return ModelLoadFailed(f"{model}: {cause}; {what}", lasting=True)
    text = f"{type(error).__name__} {error} {error.__cause__}".lower()
    found_fix = ((fix, lasting) for sign, fix, lasting in _BY_TEXT if sign in text)
    fix, lasting = next(found_fix, ("the replica's log has more", False))
    shown = fix.format(diffusers=diffusers.__version__)
    return ModelLoadFailed(f"{model}: {cause}; {shown}", lasting=lasting)


def _of_hub_or_disk(error: OSError) -> tuple[str, bool] | None:
    """What is wrong and what to do, and whether it stays so; None for any other failure."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "the disk is full; free space, or set HF_HOME to a folder on a larger disk", True
    if isinstance(error, hub.LocalEntryNotFoundError):
        return (
            f"the hub cannot be reached and HF_HOME does not have all of the model; {_NETWORK}"
        ), False
    if isinstance(error, hub.HfHubHTTPError):
        signed_in = huggingface_hub.get_token() is not None
        what = next((_WHY[each] for each in type(error).__mro__ if each in _WHY), None)
        return _of_status(error, signed_in) if what is None else (what[signed_in], True)
    return None


# Without and with a token. A gated model is of a subclass of one that is not found.
_NO_REVISION: Final = (
    "the model has no such engine_args.revision; leave it out, or name a branch, tag or commit that"
    " it has"
)
_DISABLED: Final = "the hub has disabled this model; choose another"
_WHY: Final[Mapping[type, tuple[str, str]]] = {
    hub.GatedRepoError: (
        (
            "the model is gated and HF_TOKEN is not set; accept its terms on its page on the hub,"
            " then set HF_TOKEN to a token of that account"
        ),
        (
            "the model is gated and the account of HF_TOKEN has no access to it; accept its"
            " terms on its page on the hub with that account, and see that the token may read"
            " gated models"
        ),
    ),
    hub.DisabledRepoError: (_DISABLED, _DISABLED),
    hub.RevisionNotFoundError: (_NO_REVISION, _NO_REVISION),
    hub.RepositoryNotFoundError: (
        (
            "the hub has no model of this id, or it is private, which needs HF_TOKEN; check the"
            " spelling of organisation/name"
        ),
        (
            "the hub has no model of this id, or it is private and HF_TOKEN may not read it; check"
            " the spelling of organisation/name"
        ),
    ),
}


def _of_status(error: hub.HfHubHTTPError, signed_in: bool) -> tuple[str, bool]:
    status = error.response.status_code
    if status in {401, 403}:
        if signed_in:
            return (
                f"the hub refuses HF_TOKEN ({status}); make a token that may read this model, or"
                " leave HF_TOKEN out for a public one"
            ), True
        return f"the hub refuses to give it without HF_TOKEN ({status}); set HF_TOKEN", True
    if status == 429:
        return "the hub limits the calls from this address (429); HF_TOKEN raises the limit", False
    return f"the hub answers {status}: {short_cause(error)}; {_NETWORK}", status in {400, 404}


def _ways(error: Exception) -> str:
    """How a model comes to need less of the memory that was too little."""
    device: Any = torch.OutOfMemoryError
    if isinstance(error, device) or "cuda" in str(error).lower():
        return (
            "set engine_args.quantization (int8, bitsandbytes_4bit), enable_cpu_offload or"
            " enable_layerwise_offload, or give each replica more devices with"
            " parallel_config.device_map: balanced"
        )
    return (
        "the host's memory is too small: set engine_args.quantization, a smaller"
        " engine_args.dtype, or fewer replicas (runtime.num_replicas)"
    )
