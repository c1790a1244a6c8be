"""PRTSchedule: one rank of a program as DeepSpeed pipeline instructions."""

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds

from .program.actions import GIVES_WEIGHT_GRAD, Action
from .program.build import build
from .program.costs import Costs
from .program.placement import Placement
from .program.program import Program, forward_only as evaluation_of
from .program.simulator import Timeline, simulate


class LoadMicroBatch(ds.LoadMicroBatch):
    """Put the inputs (first stage) or labels (last stage) of a micro-batch, already read, into a buffer."""


class ForwardPass(ds.ForwardPass):
    """Compute the forward of one stage."""


class BackwardPass(ds.BackwardPass):
    """Compute the backward of one stage and accumulate its gradients."""


class InputGradPass(ds.BackwardPass):
    """Compute the gradient of a stage's input; those of its weights come later."""


class WeightGradPass(ds.BufferOpInstruction):
    """Compute the gradients of a stage's weights that its InputGradPass left, and accumulate them."""


class SendActivation(ds.SendActivation):
    """Start to send a stage's output; does not wait."""


class RecvActivation(ds.RecvActivation):
    """Post the receive of a stage's input; the forward that uses it waits."""


class SendGrad(ds.SendGrad):
    """Start to send the gradient of a stage's input; does not wait."""


class RecvGrad(ds.RecvGrad):
    """Post the receive of the gradient of a stage's output; the backward that uses it waits."""


class ReduceReplicaGrads(ds.PipeInstruction):
    """Start to sum the gradients of a stage over its two copies, on two ranks; carries ``stage``. Does not wait.

    The engine adds one with None at the end, for what waits for company.
    """


_INSTRUCTIONS: dict[str, type[ds.BufferOpInstruction]] = {
    "F": ForwardPass,
    "B": BackwardPass,
    "I": InputGradPass,
    "W": WeightGradPass,
    "SEND_F": SendActivation,
    "RECV_F": RecvActivation,
    "SEND_B": SendGrad,
    "RECV_B": RecvGrad,
}


class PRTSchedule(ds.PipeSchedule):
    """A program's rank as DeepSpeed instructions, which carry ``buffer_id`` (the slot), ``stage`` and ``micro_batch``.

    Usable alone, without processes::

        for step in PRTSchedule(micro_batches=4, stages=2, stage_id=0, reuse=2):
            print(step)

    All ranks yield the same number of steps, one compute action in each at most, and a barrier may stand between any
    two: what a step waits for was sent in an earlier one.

    Args:
        micro_batches: m, the number of micro-batches in a batch.
        stages: p, the number of pipeline ranks, as in DeepSpeed's schedules.
        stage_id: the pipeline rank whose instructions are listed.
        reuse: v, stages per rank.
        placement: ``"loop"`` or ``"wave"``.
        schedule: a schedule's name, or ``"auto"``.
        max_in_flight: cap on a rank's activations, in micro-batches; None for p.
        direction: ``"unidirectional"`` or ``"bidirectional"``.
        split_backward: True, False, or None for what the schedule has.
        forward_only: list the evaluation program.
        program: the program to read; all arguments but ``stage_id`` are then those of the program.

    Raises:
        ValueError: the arguments do not make a program.
    """

    def __init__(self,
                 micro_batches: int,
                 stages: int,
                 stage_id: int,
                 reuse: int = 1,
                 placement: str = "loop",
                 schedule: str = "auto",
                 max_in_flight: float | None = None,
                 direction: str = "unidirectional",
                 split_backward: bool | None = None,
                 forward_only: bool = False,
                 program: Program | None = None) -> None:
        if program is None:
            route = Placement(placement, stages, reuse, direction)
            program = build(schedule, route, micro_batches, max_in_flight, split=split_backward)
            if forward_only:
                program = evaluation_of(program)
        super().__init__(program.micro_batches, program.placement.ranks, stage_id)
        if not 0 <= stage_id < program.placement.ranks:
            raise ValueError(f"stage_id {stage_id} is not one of the {program.placement.ranks} pipeline ranks")
        self.program = program
        self._steps = self._list_steps()

    def num_pipe_buffers(self) -> int:
        """As many slots as the rank ever needs at once."""
        return self.program.num_slots(self.stage_id)

    def buffer_of(self, stage: int, micro_batch: int) -> int:
        """The slot of a (stage, micro-batch) on this rank."""
        return self.program.slots[self.stage_id][stage, micro_batch]

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield the instructions of each step; the last one reduces gradients and steps the optimizer."""
        yield from self._steps

    def _list_steps(self) -> list[list[ds.PipeInstruction]]:
        placement = self.program.placement
        timeline = simulate(self.program, Costs.uniform(placement, placement.reuse, placement.reuse,
                                                        placement.reuse * self.program.is_split))
        steps: list[list[ds.PipeInstruction]] = [[] for _ in range(round(timeline.makespan))]
        if self.program.has_backward:
            steps.append([])
            for step, stage in self._replicas_done(timeline):
                steps[step].append(ReduceReplicaGrads(stage=stage))
        starts = {span.action: round(span.start) for span in timeline.spans[self.stage_id]}
        row = self.program.rows[self.stage_id]
        clock = 0
        pending: list[ds.PipeInstruction] = []
        for action in row:
            if action.is_compute:
                clock = starts[action]
                steps[clock] += [*pending, *self._loads(action), self._instruction(action)]
                pending = []
            elif action.kind.startswith("RECV"):
                pending.append(self._instruction(action))
            else:
                steps[clock].append(self._instruction(action))
        if self.program.has_backward:
            steps[-1] += [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]
        return steps

    def _replicas_done(self, timeline: Timeline) -> list[tuple[int, int]]:
        """For each stage with a copy on another rank the step from which both copies have all their gradients.

        The two ranks list the same stages in the same order, so that their sums meet.
        """
        placement = self.program.placement
        pair = self.stage_id, placement.mirror(self.stage_id)
        if placement.pipes == 1 or pair[0] == pair[1]:
            return []
        done = dict.fromkeys(placement.stages_on(self.stage_id), 0)
        for rank in pair:
            for span in timeline.spans[rank]:
                if span.action.kind in GIVES_WEIGHT_GRAD:
                    done[span.action.stage] = max(done[span.action.stage], round(span.end))
        return sorted((step, stage) for stage, step in done.items())

    def _instruction(self, action: Action) -> ds.BufferOpInstruction:
        return _INSTRUCTIONS[action.kind](self.buffer_of(action.stage, action.micro_batch),
                                          stage=action.stage,
                                          micro_batch=action.micro_batch)

    def _loads(self, action: Action) -> list[ds.PipeInstruction]:
        """The first stage loads inputs and the last one labels; with one stage in all, one load does both."""
        at_end = action.stage in (0, self.program.placement.stages - 1)
        if action.kind != "F" or not at_end:
            return []
        return [LoadMicroBatch(self.buffer_of(action.stage, action.micro_batch), stage=action.stage,
                               micro_batch=action.micro_batch)]
