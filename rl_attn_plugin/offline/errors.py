"""The error of bad input."""

from __future__ import annotations


class InputError(ValueError):
    """Files or options that cannot be used: what was wrong, the value got, what to do."""
