"""One error class for each kind of failure; messages name the user's line where it is known."""

from __future__ import annotations


class RungError(Exception):
    """Base of all errors that Rung raises by itself."""


class Unsupported(RungError):
    """The construct is outside what Rung lowers; the graph or op falls back to ATen."""


class VerifyError(RungError):
    """A function breaks a rule of its rung; the text shows it with a caret under the op.

    `op` is the op at fault, where the rule that raises knows it.
    """

    def __init__(self, message: str, op: object = None):
        super().__init__(message)
        self.op = op


class LoweringError(RungError):
    """A pass cannot continue on a function that verified."""


class ParseError(RungError):
    """Text is not in the language of the dumps; carries `line` and `column`, both from 1."""

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(f"{line}:{column}: {message}" if line else message)
        self.message, self.line, self.column = message, line, column


class MappingError(RungError):
    """A mapping that the machine cannot run, with the reason."""


class TargetCompileError(RungError):
    """The target's compiler refused generated source; keeps source path, log and command."""

    def __init__(self, message: str, source: str = "", log: str = "", command: str = ""):
        super().__init__(message)
        self.source, self.log, self.command = source, log, command


class LaunchError(RungError):
    """A generated kernel could not be loaded or started."""
