"""The errors that deepspeed_prt raises."""


class PRTError(Exception):
    """deepspeed_prt cannot do what the config, the model or the call asks for; the message says what to change."""


class PRTConfigError(PRTError, ValueError):
    """The ``"prt"`` section is wrong, or cannot take effect."""


class RankFailedError(PRTError, RuntimeError):
    """Another rank failed inside the batch; the message names it and its error."""


class PoisonedMessage(PRTError):
    """A message whose sender failed before it could produce what the message should bring."""
