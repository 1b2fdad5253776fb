"""An old name, until no command uses it any more."""

from .output import console as wide

__all__ = ["wide"]
