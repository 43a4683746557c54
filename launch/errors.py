"""Errors that are the user's to mend: printed as one message, exit status 1, no traceback."""

from __future__ import annotations


class JobError(Exception):
    """The job cannot be done as asked; the message says why and what helps."""


class PromptError(JobError):
    """The prompts cannot be used; the message says which file, which line and why."""


class StoreError(JobError):
    """The run directory cannot be used or written; the message says what to do."""
