"""Pictures of timelines: as text for a terminal, and as a file."""

from pathlib import Path

from rich.text import Text

from .program.placement import Placement
from .program.simulator import Timeline

_FORWARD_GLYPHS = "0123456789"
_BACKWARD_GLYPHS = "abcdefghijklmnopqrstuvwxyz"
_SHADES = ("blue", "cyan", "green", "yellow", "magenta", "red")


def as_text(timeline: Timeline, placement: Placement, width: int) -> list[Text]:
    """One line a rank, ``width`` columns wide: digits are forwards and letters backwards, by micro-batch; dots idle.

    The colour tells which of a rank's stages runs.
    """
    lines = []
    label = len(f"rank {len(timeline.spans) - 1}")
    for rank, spans in enumerate(timeline.spans):
        line = Text(f"rank {rank}".ljust(label) + " ")
        stages = placement.stages_of(rank)
        index = 0
        for column in range(width):
            moment = (column + 0.5) * timeline.makespan / width
            while index < len(spans) and spans[index].end <= moment:
                index += 1
            if index == len(spans) or spans[index].start > moment:
                line.append("·", "dim")
                continue
            action = spans[index].action
            glyphs = _FORWARD_GLYPHS if action.kind == "F" else _BACKWARD_GLYPHS
            shade = _SHADES[stages.index(action.stage) % len(_SHADES)]
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
                lap = placement.stages_of(rank).index(span.action.stage) / max(placement.reuse, 2)
                colours = pyplot.get_cmap("Blues" if span.action.kind == "F" else "Oranges")
                axes.barh(rank, span.end - span.start, left=span.start, height=0.9, color=colours(0.3 + 0.5 * lap),
                          edgecolor="white", linewidth=0.4)
                if len(spans) <= 64:
                    axes.text((span.start + span.end) / 2, rank, str(span.action.micro_batch), ha="center",
                              va="center", fontsize=6)
        axes.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))])
        axes.invert_yaxis()
        axes.set_title(f"{title}: bubble {100 * timeline.bubble_fraction:.1f} %", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("time in ms; blue: forward, orange: backward, darker: later stage of the rank")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
