"""The ``"prt"`` section of a DeepSpeed config."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, StrictBool, ValidationError, field_validator

from .errors import PRTConfigError
from .program.orders import ORDERS

SECTION = "prt"

_LATER = {
    ("partition", "profile"): "partitioning by profile does not exist yet; use null, \"uniform\", \"parameters\", "
                              "\"type:REGEX\" or a list of boundaries",
}


class PRTConfig(DeepSpeedConfigModel):
    """The ``"prt"`` section; every key is optional."""

    model_config = ConfigDict(strict=True)  # true is no number of stages, and "false" is not false

    enabled: bool = True
    """False leaves DeepSpeed untouched."""

    direction: Literal["unidirectional", "bidirectional"] = "unidirectional"
    """Micro-batches enter at rank 0, or in turn at both ends, with two copies of each stage."""

    reuse: PositiveInt | Literal["auto"] = "auto"
    """Stages per rank and pipe; "auto" takes the most that leave the ranks balanced."""

    placement: Literal["loop", "wave"] = "loop"
    """Which rank runs which stage; see :class:`~deepspeed_prt.program.placement.Placement`."""

    schedule: str = "auto"
    """Compute order: a name, the path of a CSV file, or ``package.module:function``."""

    split_backward: Literal["auto"] | StrictBool = "auto"
    """Whether input and weight gradients are separate actions: with ``schedule`` "auto" in the stages where that makes
    the step shorter, otherwise in all. "auto" may also split none, and leaves named schedules as they are."""

    max_in_flight: PositiveFloat | None = None
    """Cap on a rank's activations, in micro-batches of a whole rank; null is p."""

    partition: str | list[int] | None = Field(default=None)
    """How layers are cut into stages: null (the module's own method), uniform, parameters, type:REGEX or boundaries."""

    trace: None = None
    """Reserved."""

    @property
    def split(self) -> bool | None:
        """``split_backward``, with None for "auto"."""
        return None if self.split_backward == "auto" else self.split_backward

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        if value == "auto" or value in ORDERS or ":" in value:
            return value
        if value.endswith(".csv"):
            if not Path(value).is_file():
                raise ValueError(f"there is no CSV file {value!r}")
            return value
        raise ValueError(f"unknown schedule {value!r}{_nearest(value, ['auto', *ORDERS])}; use \"auto\", one of "
                         f"{', '.join(ORDERS)}, the path of a .csv file or \"package.module:function\"")

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str | list[int] | None) -> str | list[int] | None:
        if isinstance(value, str) and value.lower() not in ("uniform", "parameters") \
                and not value.lower().startswith("type:"):
            raise ValueError(f"unknown partition {value!r}{_nearest(value, ['uniform', 'parameters', 'type:REGEX'])}; "
                             "use null, \"uniform\", \"parameters\", \"type:REGEX\" or a list of boundaries")
        return value


def read_section(ds_config: dict[str, Any]) -> PRTConfig | None:
    """The enabled ``"prt"`` section of a DeepSpeed config, or None.

    Raises:
        PRTConfigError: an unknown key or a wrong value; the message names the nearest right one.
    """
    section = ds_config.get(SECTION)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise PRTConfigError(f'"{SECTION}" in the DeepSpeed config must be a section like {{"reuse": 2}}, '
                             f"got {section!r}")
    if section.get("enabled", True) is False:
        return None
    for key in section:
        if key not in PRTConfig.model_fields:
            raise PRTConfigError(f'unknown key "{key}" in "{SECTION}"{_nearest(key, PRTConfig.model_fields)}; '
                                 f"the keys are {', '.join(PRTConfig.model_fields)}")
    for (key, value), reason in _LATER.items():
        if section.get(key) == value and type(section.get(key)) is type(value):
            raise PRTConfigError(f'"{SECTION}": {{"{key}": {value!r}}} is refused: {reason}')
    if section.get("trace") is not None:
        raise PRTConfigError(f'"{SECTION}": "trace" is refused: traces do not exist yet; leave it out')
    try:
        config = PRTConfig(strict=True, **section)
    except ValidationError as error:
        raise PRTConfigError(_explain(error, section)) from None
    return config if config.enabled else None


def _explain(error: ValidationError, section: dict[str, Any]) -> str:
    """One line a wrong key, with the nearest right value where there is one."""
    lines = []
    for key in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors()):
        value = section.get(key)
        details = [detail for detail in error.errors() if str(detail["loc"][0]) == key]
        choices = [word.strip("' ") for detail in details if detail["type"] == "literal_error"
                   for word in detail["ctx"]["expected"].split(" or ") for word in word.split(",")]
        reason = "; ".join(dict.fromkeys(detail["msg"].removeprefix("Value error, ") for detail in details))
        hint = _nearest(value, choices) if isinstance(value, str) else ""
        lines.append(f'"{SECTION}": {{"{key}": {value!r}}} is wrong{hint}: {reason}')
    return "\n".join(lines)


def _nearest(word: str, choices: Any) -> str:
    matches = get_close_matches(word, list(choices), n=1)
    return f' (did you mean "{matches[0]}"?)' if matches else ""
