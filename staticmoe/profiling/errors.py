"""The error of this room: what was expected, what came, what to do."""

from __future__ import annotations

from staticmoe.errors import StaticMoEError


class ProfileError(StaticMoEError, ValueError):
    """A profile cannot be taken, read, compared or drawn. Names the file or the command, and the fix."""
