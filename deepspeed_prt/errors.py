"""The errors that deepspeed_prt raises."""

from collections.abc import Iterator
from contextlib import contextmanager


class PRTError(Exception):
    """deepspeed_prt cannot do what the config, the model or the call asks for; the message says what to change."""


class PRTConfigError(PRTError, ValueError):
    """The ``"prt"`` section is wrong, or cannot take effect."""


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn what programs and placements refuse, a ValueError, into a PRTConfigError with the same text."""
    try:
        yield
    except ValueError as error:
        raise error if isinstance(error, PRTError) else PRTConfigError(str(error)) from error


class RankFailedError(PRTError, RuntimeError):
    """Another rank failed inside the batch; the message names it and its error."""


class PoisonedMessage(PRTError):
    """A message whose sender failed before it could produce what the message should bring."""
