"""A stage file in the reference dialect, and how it differs from what was written.

Knows paths and messages; not which keys a dialect has.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from configs.errors import FieldError
from configs.refusal import with_value

Dialect = Literal["reference", "stage_args", "deploy"]
_NO_MODEL: Final = (
    "is missing; files of this kind leave it to the command line "
    "(python -m scripts.serve MODEL --stage-configs-path FILE); give it there, or write it here"
)
_ELSEWHERE: Final = re.compile(r", which belongs under (?:runtime|engine_args(?:\.\w+)?)")
_HOME: Final = re.compile(r"under (?:runtime|engine_args)(?![.\w])")


@dataclass
class Translation:
    """A stage file in the reference dialect, and how it differs from what was written.

    Attributes:
        dialect: Which one it was.
        document: In the reference dialect; not yet checked.
        faults: Keys that are refused because the service does not have them.
        ignored: Paths, as written, of keys that change nothing here.
        names: Paths of the document, to where the same stands in the file.
    """

    dialect: Dialect
    document: dict[Any, Any]
    faults: list[FieldError] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def written(self, path: str) -> str:
        """Return where in the file the thing stands that has this path in the document."""
        for prefix in sorted(self.names, key=len, reverse=True):
            rest = path.removeprefix(prefix)
            if path.startswith(prefix) and (not rest or rest[0] in ".["):
                return self.names[prefix] + rest
        return self._flat(path) if self.dialect == "deploy" else path

    def reworded(self, fault: FieldError) -> FieldError:
        """Return the fault with its paths as they stand in the file."""
        message = fault.message
        no_model = fault.code == "missing" and fault.param.endswith(".engine_args.model")
        if no_model and self.dialect != "reference":
            message = _NO_MODEL
        if self.dialect == "stage_args":
            message = message.replace("stages[", "stage_args[")
        elif self.dialect == "deploy":
            message = self._flat(_HOME.sub("in the stage itself", _ELSEWHERE.sub("", message)))
        return FieldError(self.written(fault.param), message, fault.code)

    @staticmethod
    def _flat(text: str) -> str:
        return text.replace("engine_args.", "").replace("runtime.", "")

    def ignore(self, path: str) -> None:
        """Note a key that changes nothing; `path` is that of the document."""
        written = self.written(path)
        if written not in self.ignored:
            self.ignored.append(written)

    def refuse(self, path: str, value: Any, reason: str) -> None:
        """Note a key that is refused; `path` is that of the document."""
        self.faults.append(FieldError(self.written(path), with_value(reason, value)))
