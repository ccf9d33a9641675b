"""The one tree of errors that the service answers with.

Each class carries its public face: the HTTP status, the `code` a client may branch on, and whether
the same request may be sent again as it is. The text of an error names the field, the value that
was found and the way to fix it. `api/errors.py` turns these into responses.

    stage file, environment ── ConfigurationError ──► launcher prints it, exits non-zero
    client → api ── MalformedRequest, InvalidRequest, NotFound, Conflict, TooLarge ──► 4xx
    api → routing → Redis ── QueueFull, Unavailable ──► 429, 503 with Retry-After
    replica ── GenerationError ──► stored in the record of the request
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self


@dataclass(frozen=True)
class FieldError:
    """One wrong field: where it stands, what is wrong with it, and a word for programs."""

    param: str
    message: str
    code: str = "invalid"


class ServingError(Exception):
    """Base of every error that has a public face; raised itself only for a fault of our own.

    Attributes:
        status: HTTP status of the answer.
        code: Stable word for programs.
        most_details: How many wrong fields are told at most; None for all.
        retryable: Whether sending the same request again may succeed.
        message: One sentence or more for people.
        param: Path of the field that is wrong, such as `width` or `stages[0].runtime.devices`.
        details: Every wrong field, when there may be several.
        retry_after: Seconds after which a retry makes sense, or None when unknown.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    most_details: ClassVar[int | None] = None
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: Sequence[FieldError] = (),
        retry_after: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        """Keep the parts of the error; `param` defaults to that of the only detail."""
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        if param is None and len(self.details) == 1:
            param = self.details[0].param
        self.param = param
        self.retry_after = retry_after
        if retryable is not None:
            self.retryable = retryable

    @classmethod
    def from_details(cls, details: Sequence[FieldError], heading: str = "") -> Self:
        """Make one error of several wrong fields, its message a line for each under the heading."""
        shown = details[: cls.most_details]
        lines = [f"{detail.param}: {detail.message}" for detail in shown]
        if heading and len(lines) > 1:
            told = f"; the first {len(shown)}" if len(details) > len(shown) else ""
            lines = [f"{heading} ({len(details)} errors{told})", *(f"  - {line}" for line in lines)]
        elif heading:
            lines = [f"{heading}: {line}" for line in lines]
        return cls("\n".join(lines), details=details)


class ConfigurationError(ServingError):
    """Raised at start when the environment or the stage file is refused; never during a request."""

    code = "configuration"


class MalformedRequest(ServingError):
    """Raised when a body cannot be read at all: not JSON, broken multipart, a key in two places."""

    status = 400
    code = "malformed_request"


class InvalidRequest(ServingError):
    """Raised when a body can be read and fields of it are wrong; `details` holds all of them."""

    status = 422
    code = "invalid_parameter"
    most_details = 20


class Unauthorized(ServingError):
    """Raised when the service asks for a key and the call brings none, or another one."""

    status = 401
    code = "unauthorized"


class Forbidden(ServingError):
    """Raised when a browser was made to call by the page of another site."""

    status = 403
    code = "forbidden"


class NotFound(ServingError):
    """Raised when an id or a name is unknown, or is past its retention."""

    status = 404
    code = "not_found"


class Conflict(ServingError):
    """Raised when the state of a request or replica does not allow what was asked."""

    status = 409
    code = "conflict"


class NotEditableWhileRunning(Conflict):
    """Raised when a parameter is changed that the engine cannot change between two steps."""

    code = "not_editable_while_running"


class NotEditable(Conflict):
    """Raised when a request in a terminal state, or a field that never changes, is edited."""

    code = "not_editable"


class IdempotencyMismatch(Conflict):
    """Raised when an idempotency key comes again with another body."""

    code = "idempotency_key_reused"


class RequestCanceled(Conflict):
    """Raised by a call that waited for a request which was canceled meanwhile."""

    code = "canceled"


class RequestExpired(Conflict):
    """Raised by a call that waited for a request which did not start by the time it had to."""

    code = "expired"


class TooLarge(ServingError):
    """Raised when a body or an image in it is above the size limit."""

    status = 413
    code = "too_large"


class QueueFull(ServingError):
    """Raised when every ready replica already has as many requests waiting as it may have."""

    status = 429
    code = "queue_full"
    retryable = True


class Unavailable(ServingError):
    """Raised when the service cannot take a request now though the request is right."""

    status = 503
    code = "unavailable"
    retryable = True


class NoReadyReplica(Unavailable):
    """Raised when no replica of the wanted model is ready: all are loading, draining or gone."""

    code = "no_ready_replica"


class StoreUnavailable(Unavailable):
    """Raised when Redis does not answer, so that nothing can be recorded or looked up."""

    code = "store_unavailable"


class GenerationError(ServingError):
    """Base of what goes wrong on a replica; recorded as the failure of the request."""

    code = "generation_error"

    @classmethod
    def of_code(cls, code: str, message: str, *, retryable: bool) -> "GenerationError":
        """Return the error of a recorded code; one that is not known here is the base.

        Whether it is `retryable` is what the record says, and not what is usual for the code.
        """
        kinds = [cls]
        for kind in kinds:
            if kind.code == code:
                return kind(message, retryable=retryable)
            kinds.extend(kind.__subclasses__())
        return cls(message, retryable=retryable)


# Exit code of a replica whose next try would fail as well; its supervisor does not start it again.
EXIT_LASTING: Final = 5


class ModelLoadFailed(GenerationError):
    """Raised when the pipeline of a replica cannot be loaded or warmed up.

    Attributes:
        lasting: Whether it stays so until a person changes something: another try is in vain.
    """

    code = "model_load_failed"

    def __init__(self, message: str, *, lasting: bool = False, **parts: Any) -> None:
        """Take the parts of any error beside."""
        super().__init__(message, **parts)
        self.lasting = lasting


class OutOfMemory(GenerationError):
    """Raised when the device has too little memory for the request; a smaller one may fit."""

    code = "out_of_memory"


class GenerationFailed(GenerationError):
    """Raised when the pipeline itself raises during a request."""

    code = "generation_failed"


class LoraLoadFailed(GenerationError):
    """Raised when an adapter that a request names cannot be read or does not fit the model."""

    code = "lora_load_failed"


class OutputWriteFailed(GenerationError):
    """Raised when an output was made and could not be stored."""

    code = "output_write_failed"
    retryable = True


class InputUnavailable(GenerationError):
    """Raised when an input image of a request cannot be read when it is to run."""

    code = "input_unavailable"


class NonFiniteOutput(GenerationError):
    """Raised when the pipeline gives NaN or infinity instead of an image."""

    code = "non_finite_output"


class ReplicaCrashed(GenerationError):
    """Recorded when a request was in flight in as many replica crashes as it may have attempts."""

    code = "replica_crashed"


class DeviceLost(GenerationError):
    """Raised when a device answers no call of this process any more; no request is failed by it.

    Its replica hands its requests back and ends; it fails by this only at its start.
    """

    code = "device_lost"
    retryable = True


class TimedOut(GenerationError):
    """Recorded when a request ran longer than its own `timeout`."""

    code = "timeout"
