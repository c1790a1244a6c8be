"""The error of programs that must not run."""


class ProgramError(ValueError):
    """A program that must not run; the message names the action and the rank."""
