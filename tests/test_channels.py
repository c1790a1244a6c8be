"""What a rank keeps of its messages while they are on their way, where sends can be asked (as NCCL's can)."""

import weakref

import pytest
import torch

from deepspeed_prt.channels import _Sending


class Work:
    """A send that is done when the test says so."""

    def __init__(self):
        self.is_done = False

    def is_completed(self):
        return self.is_done

    def wait(self):
        self.is_done = True


def send(sending, works, tensors):
    tensor = torch.zeros(3)
    works.append(Work())
    tensors.append(weakref.ref(tensor))
    sending.watch(works[-1], tensor)


@pytest.mark.parametrize("first_done", [0, 1])
def test_a_tensor_is_let_go_when_it_has_left_whatever_else_is_on_its_way(first_done):
    sending, works, tensors = _Sending(pollable=True), [], []
    for _ in range(2):
        send(sending, works, tensors)
    works[first_done].is_done = True
    send(sending, works, tensors)
    assert [tensor() is None for tensor in tensors] == [first_done == 0, first_done == 1, False]
    sending.flush()
    assert all(work.is_done for work in works) and all(tensor() is None for tensor in tensors)
