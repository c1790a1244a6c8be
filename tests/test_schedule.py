"""PRTSchedule: a program as DeepSpeed instructions."""

from collections import defaultdict

import pytest
from deepspeed.runtime.pipe import schedule as ds
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.build import build
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete, forward_only
from deepspeed_prt.program.sources import program_from
from deepspeed_prt.schedule import InputGradPass, PRTSchedule, WeightGradPass

from .program.common import BI, programs, rows_of

SHORT = {"LoadMicroBatch": "Load", "ForwardPass": "F", "BackwardPass": "B", "InputGradPass": "I",
         "WeightGradPass": "W", "SendActivation": "SEND_F", "RecvActivation": "RECV_F", "SendGrad": "SEND_B",
         "RecvGrad": "RECV_B"}
COMPUTES = ("ForwardPass", "BackwardPass", "InputGradPass", "WeightGradPass")
GIVE_WEIGHT_GRADS = ("BackwardPass", "WeightGradPass")


def text_of(instruction):
    """An instruction in the notation of actions, the buffer in brackets."""
    if instruction.name == "ReduceReplicaGrads":
        return f"{instruction.stage}Reduce"
    if instruction.name not in SHORT:
        return instruction.name
    return f"{instruction.stage}{SHORT[instruction.name]}{instruction.micro_batch}[{instruction.buffer_id}]"


def written(schedule):
    """Each step as text; '-' where the rank is idle."""
    return [" ".join(map(text_of, step)) or "-" for step in schedule.steps()]


END = "ReduceTiedGrads ReduceGrads OptimizerStep"


def test_one_rank_one_micro_batch():
    assert written(PRTSchedule(micro_batches=1, stages=1, stage_id=0)) == ["0Load0[0] 0F0[0]", "0B0[0]", END]


def test_two_ranks():
    assert written(PRTSchedule(micro_batches=2, stages=2, stage_id=0, schedule="1f1b")) == [
        "0Load0[0] 0F0[0] 0SEND_F0[0]",
        "0RECV_B0[0] 0Load1[1] 0F1[1] 0SEND_F1[1]",
        "-",
        "0RECV_B1[1] 0B0[0]",
        "-",
        "0B1[1]",
        END,
    ]
    assert written(PRTSchedule(micro_batches=2, stages=2, stage_id=1, schedule="1f1b")) == [
        "-",
        "1RECV_F0[0] 1Load0[0] 1F0[0]",
        "1RECV_F1[1] 1B0[0] 1SEND_B0[0]",
        "1Load1[1] 1F1[1]",
        "1B1[1] 1SEND_B1[1]",
        "-",
        END,
    ]


def test_reuse_in_a_wave():
    # Both ends of the pipeline are on rank 0: it loads the inputs and the labels.
    assert written(PRTSchedule(1, 2, 0, reuse=2, placement="wave", split_backward=False)) == [
        "0Load0[0] 0F0[0] 0SEND_F0[0]",
        "-",
        "-",
        "3RECV_F0[1] 3Load0[1] 3F0[1]",
        "3B0[1] 3SEND_B0[1]",
        "-",
        "-",
        "0RECV_B0[0] 0B0[0]",
        END,
    ]
    assert written(PRTSchedule(1, 2, 1, reuse=2, placement="wave", split_backward=False)) == [
        "-",
        "1RECV_F0[0] 1F0[0]",
        "2F0[1] 2SEND_F0[1]",
        "-",
        "-",
        "2RECV_B0[1] 2B0[1]",
        "1B0[0] 1SEND_B0[0]",
        "-",
        END,
    ]


def test_split_backwards():
    assert written(PRTSchedule(2, 2, 0, schedule="zero_bubble")) == [
        "0Load0[0] 0F0[0] 0SEND_F0[0]",
        "0RECV_B0[0] 0Load1[1] 0F1[1] 0SEND_F1[1]",
        "-",
        "0I0[0]",
        "0RECV_B1[1] 0W0[0]",
        "0I1[1]",
        "0W1[1]",
        END,
    ]
    assert written(PRTSchedule(2, 2, 1, schedule="zero_bubble")) == [
        "-",
        "1RECV_F0[0] 1Load0[0] 1F0[0]",
        "1RECV_F1[1] 1I0[0] 1SEND_B0[0]",
        "1Load1[1] 1F1[1]",
        "1I1[1] 1SEND_B1[1]",
        "1W0[0]",
        "1W1[1]",
        END,
    ]


def test_a_whole_backward_takes_two_steps_beside_split_ones():
    program = complete("by hand", rows_of("""
        0F0 0F1 0B0 0B1
        1F0 1I0 1F1 1I1 1W0 1W1
    """), Placement("loop", 2, 1), 2, 2)
    assert written(PRTSchedule(2, 2, 0, program=program)) == [
        "0Load0[0] 0F0[0] 0SEND_F0[0]",
        "0RECV_B0[0] 0Load1[1] 0F1[1] 0SEND_F1[1]",
        "-",
        "0RECV_B1[1] 0B0[0]",
        "-",
        "0B1[1]",
        "-",
        END,
    ]


def test_both_directions():
    # Micro-batch 0 goes down, micro-batch 1 up. The copies of stage 1 have their gradients a step before those of
    # stage 0, and so are summed while the last backward runs.
    assert written(PRTSchedule(2, 2, 0, schedule="1f1b", direction=BI)) == [
        "1RECV_F1[0] 0Load0[1] 0F0[1] 0SEND_F0[1]",
        "1Load1[0] 1F1[0]",
        "0RECV_B0[1] 1B1[0] 1SEND_B1[0]",
        "1Reduce 0B0[1]",
        f"0Reduce {END}",
    ]
    assert written(PRTSchedule(2, 2, 1, schedule="1f1b", direction=BI)) == [
        "1RECV_F0[0] 0Load1[1] 0F1[1] 0SEND_F1[1]",
        "1Load0[0] 1F0[0]",
        "0RECV_B1[1] 1B0[0] 1SEND_B0[0]",
        "1Reduce 0B1[1]",
        f"0Reduce {END}",
    ]


def test_both_directions_with_one_micro_batch():
    # Rank 0 computes nothing of stage 1, nor rank 1 of stage 0, but their copies need the gradients all the same.
    assert written(PRTSchedule(1, 2, 0, schedule="1f1b", direction=BI)) == [
        "0Load0[0] 0F0[0] 0SEND_F0[0]",
        "-",
        "-",
        "1Reduce 0RECV_B0[0] 0B0[0]",
        f"0Reduce {END}",
    ]
    assert written(PRTSchedule(1, 2, 1, schedule="1f1b", direction=BI)) == [
        "-",
        "1RECV_F0[0] 1Load0[0] 1F0[0]",
        "1B0[0] 1SEND_B0[0]",
        "1Reduce",
        f"0Reduce {END}",
    ]


def test_both_directions_with_split_backwards():
    assert written(PRTSchedule(2, 2, 0, schedule="zero_bubble", direction=BI)) == [
        "1RECV_F1[0] 0Load0[1] 0F0[1] 0SEND_F0[1]",
        "1Load1[0] 1F1[0]",
        "0RECV_B0[1] 1I1[0] 1SEND_B1[0]",
        "0I0[1]",
        "1W1[0]",
        "1Reduce 0W0[1]",
        f"0Reduce {END}",
    ]


def test_the_middle_one_of_three_ranks_has_nobody_to_sum_with():
    assert written(PRTSchedule(2, 3, 1, schedule="1f1b", direction=BI)) == [
        "-",
        "1RECV_F0[0] 1RECV_F1[1] 1F0[0] 1SEND_F0[0]",
        "1RECV_B0[0] 1F1[1] 1SEND_F1[1]",
        "-",
        "1RECV_B1[1] 1B0[0] 1SEND_B0[0]",
        "1B1[1] 1SEND_B1[1]",
        "-",
        END,
    ]
    # On rank 0 stage 2 is done at once, but its copy on rank 2 is a step late.
    assert written(PRTSchedule(2, 3, 0, schedule="1f1b", direction=BI))[3:] == [
        "2RECV_F1[1] 2Load1[1] 2F1[1]",
        "0RECV_B0[0] 2B1[1] 2SEND_B1[1]",
        "2Reduce 0B0[0]",
        "-",
        f"0Reduce {END}",
    ]


def test_evaluation_reduces_nothing():
    assert written(PRTSchedule(2, 2, 1, forward_only=True)) == [
        "-",
        "1RECV_F0[0] 1RECV_F1[1] 1Load0[0] 1F0[0]",
        "1Load1[1] 1F1[1]",
    ]
    assert written(PRTSchedule(2, 2, 1, forward_only=True, direction=BI)) == [
        "1RECV_F0[0] 0Load1[1] 0F1[1] 0SEND_F1[1]",
        "1Load0[0] 1F0[0]",
    ]


def test_instructions_are_deepspeeds_and_print_like_them():
    steps = list(PRTSchedule(micro_batches=1, stages=2, stage_id=0, direction=BI, schedule="zero_bubble"))
    assert list(map(repr, steps[0])) == ["LoadMicroBatch(buffer_id=0, stage=0, micro_batch=0)",
                                         "ForwardPass(buffer_id=0, stage=0, micro_batch=0)",
                                         "SendActivation(buffer_id=0, stage=0, micro_batch=0)"]
    kinds = [type(i).__mro__[1] for step in steps for i in step]
    assert kinds[:3] == [ds.LoadMicroBatch, ds.ForwardPass, ds.SendActivation]
    assert [type(i) for i in steps[-1]][1:] == [ds.ReduceTiedGrads, ds.ReduceGrads, ds.OptimizerStep]
    assert repr(steps[-1][0]) == "ReduceReplicaGrads(stage=0)"
    assert isinstance(steps[-1][0], ds.PipeInstruction)
    assert issubclass(InputGradPass, ds.BackwardPass)
    assert issubclass(WeightGradPass, ds.BufferOpInstruction)
    assert "WeightGradPass(buffer_id=0, stage=0, micro_batch=0)" in [repr(i) for step in steps for i in step]


def test_it_is_a_deepspeed_schedule():
    schedule = PRTSchedule(micro_batches=4, stages=2, stage_id=1, reuse=2)
    assert isinstance(schedule, ds.PipeSchedule)
    assert (schedule.num_micro_batches, schedule.num_stages, schedule.stage) == (4, 2, 1)
    assert list(map(repr, schedule)) == list(map(repr, schedule.steps())), "iterates, and from the start each time"
    assert schedule.num_pipe_buffers() == schedule.program.num_slots(1)
    assert [schedule.buffer_of(stage, 0) for stage in (1, 3)] == [schedule.program.slots[1][stage, 0]
                                                                  for stage in (1, 3)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none(rank):
    with pytest.raises(ValueError, match=f"stage_id {rank} is not one of the 2 pipeline ranks"):
        PRTSchedule(micro_batches=2, stages=2, stage_id=rank)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"schedule": "nothing"}, "unknown schedule 'nothing'"),
    ({"placement": "spiral"}, "unknown placement 'spiral'"),
    ({"reuse": 0}, "reuse .* at least 1, got 0"),
    ({"reuse": 2, "schedule": "1f1b"}, "'1f1b' has one stage per rank"),
    ({"max_in_flight": 0.5}, "max_in_flight 0.5 is too small"),
    ({"micro_batches": 0}, "at least 1 micro-batch, got 0"),
    ({"direction": "up"}, "unknown direction 'up': use one of unidirectional, bidirectional"),
    ({"direction": BI, "stages": 1}, "bidirectional pipeline needs at least 2 ranks"),
    ({"schedule": "zero_bubble", "split_backward": False}, "'zero_bubble' splits the backward, which split_backward"),
    ({"schedule": "zbv"}, "'zbv' is for placement 'wave' with reuse 2"),
])
def test_arguments_that_make_no_program(arguments, message):
    with pytest.raises(ValueError, match=message):
        PRTSchedule(**{"micro_batches": 2, "stages": 2, "stage_id": 0, **arguments})


def test_arguments_reach_the_program():
    schedule = PRTSchedule(5, 3, 0, reuse=2, placement="wave", schedule="interleaved_1f1b", max_in_flight=2)
    assert schedule.program == build("interleaved_1f1b", Placement("wave", 3, 2), 5, 2)
    assert PRTSchedule(5, 3, 0, reuse=2, forward_only=True).program == forward_only(
        build("auto", Placement("loop", 3, 2), 5))
    both = Placement("loop", 3, 2, BI)
    assert PRTSchedule(5, 3, 0, reuse=2, direction=BI, schedule="gpipe", split_backward=True).program == build(
        "gpipe", both, 5, split=True)
    assert PRTSchedule(5, 3, 0, reuse=2, direction=BI, split_backward=False).program == build(
        "auto", both, 5, split=False)
    program = program_from("gpipe", Placement("loop", 2, 2), 3)
    assert PRTSchedule(3, 2, 1, program=program).program is program


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_1f1b_computes_in_the_order_of_deepspeeds_own_schedule(ranks, micro_batches):
    for rank in range(ranks):
        def order(schedule):
            return [i.name for step in schedule.steps() for i in step if i.name in ("ForwardPass", "BackwardPass")]

        ours = PRTSchedule(micro_batches, ranks, rank, schedule="1f1b")
        assert order(ours) == order(ds.TrainSchedule(micro_batches, ranks, rank))
        assert ours.num_pipe_buffers() <= ds.TrainSchedule(micro_batches, ranks, rank).num_pipe_buffers() + 1
        assert len(list(ours.steps())) == len(list(ds.TrainSchedule(micro_batches, ranks, rank).steps())) + 1


def computes(step):
    return [i for i in step if i.name in COMPUTES]


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_steps_of_all_ranks(program, evaluates):
    program = forward_only(program) if evaluates else program
    p, m, routes = program.placement.ranks, program.micro_batches, program.placement.routes
    of_rank = [list(PRTSchedule(m, p, rank, program=program).steps()) for rank in range(p)]
    assert len({len(steps) for steps in of_rank}) == 1, "all ranks have the same number of steps"
    for rank, steps in enumerate(of_rank):
        assert all(len(computes(step)) <= 1 for step in steps)
        ends = [i.name for step in steps for i in step
                if not isinstance(i, ds.BufferOpInstruction) and i.name != "ReduceReplicaGrads"]
        assert ends == ([] if evaluates else END.split())
        assert evaluates or [i.name for i in steps[-1] if i.name != "ReduceReplicaGrads"] == END.split()
        done = [(i.stage, SHORT[i.name], i.micro_batch) for step in steps for i in computes(step)]
        assert done == list(program.compute_rows()[rank])
        loads = [(i.stage, i.micro_batch) for step in steps for i in step if i.name == "LoadMicroBatch"]
        assert sorted(loads) == sorted({(stage, micro_batch) for micro_batch in range(m)
                                        for stage in (0, program.placement.stages - 1)
                                        if routes[micro_batch % len(routes)][stage] == rank})


@settings(max_examples=40, deadline=None)
@given(programs(directions=[BI]), st.booleans())
def test_both_ranks_of_a_pair_sum_the_same_stages_in_the_same_order(program, evaluates):
    program = forward_only(program) if evaluates else program
    p, placement = program.placement.ranks, program.placement
    of_rank = [list(PRTSchedule(program.micro_batches, p, rank, program=program).steps()) for rank in range(p)]
    sums = [[(step, i.stage) for step, instructions in enumerate(steps) for i in instructions
             if i.name == "ReduceReplicaGrads"] for steps in of_rank]
    for rank, of_this in enumerate(sums):
        mirror = p - 1 - rank
        assert of_this == sums[mirror], "in the same steps, too"
        held = {stage for route in placement.routes for stage, at in enumerate(route) if at == rank}
        assert sorted(stage for _, stage in of_this) == (sorted(held) if mirror != rank and not evaluates else [])
        for summed_at, stage in of_this:
            for which in (rank, mirror):
                last = [step for step, instructions in enumerate(of_rank[which]) for i in instructions
                        if i.name in GIVE_WEIGHT_GRADS and i.stage == stage]
                assert not last or last[-1] < summed_at
        for step, stage in of_this:
            first = of_rank[rank][step][0]
            assert first.name == "ReduceReplicaGrads", "before the work of its step, which hides it"
            assert placement.rank_of(stage, 0) in (rank, mirror)


def test_one_direction_has_no_copies_to_sum():
    names = {i.name for rank in range(3) for step in PRTSchedule(4, 3, rank, reuse=2).steps() for i in step}
    assert "ReduceReplicaGrads" not in names


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_a_barrier_may_stand_between_any_two_steps(program, evaluates):
    # Executed step by step on buffers that hold names in the place of tensors; within a step nothing is delivered.
    # An output that stays on its rank goes straight into the buffer of the stage above.
    program = forward_only(program) if evaluates else program
    p, routes, last = program.placement.ranks, program.placement.routes, program.placement.stages - 1
    schedules = [PRTSchedule(program.micro_batches, p, rank, program=program) for rank in range(p)]
    inputs, labels, outputs = ([[None] * schedule.num_pipe_buffers() for schedule in schedules] for _ in range(3))
    gradients = [{} for _ in range(p)]
    awaits_weight_grad = [set() for _ in range(p)]
    added, summed = defaultdict(list), set()
    delivered, posted = defaultdict(list), defaultdict(list)
    place_of = [{} for _ in range(p)]

    def message(rank, kind, i, source):
        place = place_of[rank][kind, i.stage, i.micro_batch]
        assert len(delivered[source, rank]) > place, f"rank {rank} waits for {i} in its step"
        return delivered[source, rank][place]

    for step in zip(*(schedule.steps() for schedule in schedules), strict=True):
        sent = defaultdict(list)
        for rank, instructions in enumerate(step):
            for i in instructions:
                if i.name == "ReduceReplicaGrads":
                    summed.add((rank, i.stage))
                if not hasattr(i, "micro_batch"):
                    continue
                route = routes[i.micro_batch % len(routes)]
                if i.name in ("RecvActivation", "RecvGrad"):
                    source = route[i.stage + (-1 if i.name == "RecvActivation" else 1)]
                    place_of[rank][i.name, i.stage, i.micro_batch] = len(posted[source, rank])
                    posted[source, rank].append(i)
                elif i.name == "ForwardPass":
                    if i.stage == 0:
                        assert inputs[rank][i.buffer_id] == ("loaded", 0, i.micro_batch)
                    elif route[i.stage - 1] != rank:
                        arrived = message(rank, "RecvActivation", i, route[i.stage - 1])
                        assert arrived == ("output", i.stage - 1, i.micro_batch)
                    else:
                        assert inputs[rank][i.buffer_id] == ("output", i.stage - 1, i.micro_batch)
                    if i.stage == last and last > 0:
                        assert labels[rank][i.buffer_id] == ("loaded", last, i.micro_batch)
                    outputs[rank][i.buffer_id] = ("output", i.stage, i.micro_batch)
                    if i.stage < last and route[i.stage + 1] == rank:
                        above = schedules[rank].buffer_of(i.stage + 1, i.micro_batch)
                        inputs[rank][above] = outputs[rank][i.buffer_id]
                elif i.name in ("BackwardPass", "InputGradPass"):
                    assert outputs[rank][i.buffer_id] == ("output", i.stage, i.micro_batch), "still held"
                    if i.stage < last and route[i.stage + 1] != rank:
                        arrived = message(rank, "RecvGrad", i, route[i.stage + 1])
                        assert arrived == ("gradient", i.stage + 1, i.micro_batch)
                    elif i.stage < last:
                        assert gradients[rank].pop((i.stage + 1, i.micro_batch))
                    gradients[rank][i.stage, i.micro_batch] = True
                    if i.name == "InputGradPass":
                        awaits_weight_grad[rank].add((i.stage, i.micro_batch))
                elif i.name == "WeightGradPass":
                    assert outputs[rank][i.buffer_id] == ("output", i.stage, i.micro_batch), "still held"
                    awaits_weight_grad[rank].remove((i.stage, i.micro_batch))
                elif i.name == "LoadMicroBatch":
                    loaded = inputs if i.stage == 0 else labels
                    loaded[rank][i.buffer_id] = ("loaded", i.stage, i.micro_batch)
                elif i.name == "SendActivation":
                    sent[rank, route[i.stage + 1]].append(outputs[rank][i.buffer_id])
                elif i.name == "SendGrad":
                    assert gradients[rank].pop((i.stage, i.micro_batch))
                    sent[rank, route[i.stage - 1]].append(("gradient", i.stage, i.micro_batch))
                if i.name in GIVE_WEIGHT_GRADS:
                    assert (rank, i.stage) not in summed, "summed too early"
                    added[i.stage, i.micro_batch % len(routes)].append(i.micro_batch)
        for channel, messages in sent.items():
            delivered[channel] += messages
    assert {channel: len(messages) for channel, messages in delivered.items()} == {
        channel: len(messages) for channel, messages in posted.items()}
    if not evaluates:
        entered = [{(0, m) for m in range(program.micro_batches) if routes[m % len(routes)][0] == rank}
                   for rank in range(p)]
        assert [set(left) for left in gradients] == entered, "only those of the first stage's inputs are left"
        assert not any(awaits_weight_grad)
        assert all(order == list(range(pipe, program.micro_batches, len(routes)))
                   for (_, pipe), order in added.items()), "in micro-batch order, per stage and pipe"
