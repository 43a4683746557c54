"""How a command ends: exit statuses, and errors that are the user's to mend, printed as one message without a traceback."""

from __future__ import annotations

EXIT_STATUS = {"PASS": 0, "DRIFT": 2, "INCONCLUSIVE": 3, "INVALID": 1}
EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


class JobError(Exception):
    """The job cannot be done as asked; the message says why and what helps."""


class PromptError(JobError):
    """The prompts cannot be used; the message says which file, which line and why."""


class StoreError(JobError):
    """The run directory cannot be used or written; the message says what to do."""


def print_error(message: object) -> None:
    """One message on standard error."""
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
