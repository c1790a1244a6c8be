"""Pictures of timelines: as text for a terminal, and as a file."""

from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from rich.text import Text

from .program.actions import Action
from .program.placement import UP, Placement
from .program.simulator import Timeline

_GLYPHS = {"F": "0123456789", "B": ascii_lowercase, "I": ascii_lowercase, "W": ascii_uppercase}
_COLOURS = {"F": "Blues", "B": "Oranges", "I": "Oranges", "W": "Greens"}
_SHADES = ("blue", "cyan", "green", "yellow", "magenta", "red")


def as_text(timeline: Timeline, placement: Placement, width: int) -> list[Text]:
    """One line a rank, ``width`` columns wide, by micro-batch: digits are forwards, letters backwards (or input
    gradients), capitals weight gradients, dots idle.

    The colour tells which of a rank's stages runs.
    """
    lines = []
    label = len(f"rank {len(timeline.spans) - 1}")
    for rank, spans in enumerate(timeline.spans):
        line = Text(f"rank {rank}".ljust(label) + " ")
        index = 0
        for column in range(width):
            moment = (column + 0.5) * timeline.makespan / width
            while index < len(spans) and spans[index].end <= moment:
                index += 1
            if index == len(spans) or spans[index].start > moment:
                line.append("·", "dim")
                continue
            action = spans[index].action
            glyphs = _GLYPHS[action.kind]
            shade = _SHADES[_lap(action, rank, placement) % len(_SHADES)]
            line.append(glyphs[action.micro_batch % len(glyphs)], shade if action.kind == "F" else f"black on {shade}")
        lines.append(line)
    return lines


def to_file(timelines: dict[str, tuple[Timeline, Placement]], path: Path) -> None:
    """Draw timelines below each other, on one time axis, into an image file; the suffix chooses the format.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'deepspeed-prt[plot]'") from error
    height = sum(0.32 * len(timeline.spans) + 0.7 for timeline, _ in timelines.values())
    figure, panels = pyplot.subplots(len(timelines), 1, sharex=True, squeeze=False, figsize=(11, height))
    for axes, (title, (timeline, placement)) in zip(panels[:, 0], timelines.items(), strict=True):
        for rank, spans in enumerate(timeline.spans):
            for span in spans:
                lap = _lap(span.action, rank, placement) / max(placement.reuse, 2)
                colours = pyplot.get_cmap(_COLOURS[span.action.kind])
                hatch = "//" if placement.pipe_of(span.action.micro_batch) == UP else None
                axes.barh(rank, span.end - span.start, left=span.start, height=0.9, color=colours(0.3 + 0.5 * lap),
                          edgecolor="white", linewidth=0.4, hatch=hatch)
                if len(spans) <= 64:
                    axes.text((span.start + span.end) / 2, rank, str(span.action.micro_batch), ha="center",
                              va="center", fontsize=6)
        axes.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))])
        axes.invert_yaxis()
        axes.set_title(f"{title}: bubble {100 * timeline.bubble_fraction:.1f} %", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("time in ms; blue: forward, orange: backward or input gradient, green: weight gradient; "
                             "darker: later stage of the rank; hatched: up pipe", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _lap(action: Action, rank: int, placement: Placement) -> int:
    """How many of the rank's stages the micro-batch has met before."""
    return placement.stages_of(rank, placement.pipe_of(action.micro_batch)).index(action.stage)
