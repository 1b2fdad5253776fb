"""How a command ends: exit status 0; 2 and one line on stderr after a mistake; 130 after Ctrl-C."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

MISTAKE = 2
INTERRUPTED = 130


def carry_out(commands: typer.Typer, name: str, argv: list[str] | None = None) -> int:
    """Run the command that `argv` names (by default the process's arguments) and return its exit status.

    ValueError, OSError and a wrong command line become one line on stderr. Any other exception is a defect of the
    program and is raised with its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            status = commands(argv, prog_name=name, standalone_mode=False)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except (ValueError, OSError) as error:
        return fail(str(error))
    except Exception as error:
        # newer versions of typer have their own copy of click: its errors are known by their names and methods
        kind = type(error).__name__
        if kind == "Abort":
            return fail("interrupted", INTERRUPTED)
        if kind == "OutOfMemoryError":  # torch's own class; torch is not imported here
            return fail(str(error).split(". ")[0])
        if not hasattr(error, "format_message"):
            raise
        if kind == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return MISTAKE
        return fail(error.format_message())
    return status if isinstance(status, int) else 0


def fail(message: str, status: int = MISTAKE) -> int:
    """Print the message as one line on stderr, and return the exit status."""
    print("skimkv:", " ".join(message.split()), file=sys.stderr)
    return status


def _print_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning as one line on stderr, without the place in the source."""
    print("skimkv: warning:", " ".join(str(message).split()), file=sys.stderr)
