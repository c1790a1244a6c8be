"""The worker processes themselves."""

import os

import pytest

from .workers import TaskFailed, World


def test_processes_that_die_are_started_anew(monkeypatch):
    fork, attempts = World._fork, []

    def dies_at_first(world):
        fork(world)
        attempts.append(world)
        if len(attempts) == 1:
            world._processes[0].kill()  # as where another program has taken the port

    monkeypatch.setattr(World, "_fork", dies_at_first)
    world = World(1)
    try:
        assert len(attempts) == 2
        first, = world.run(os.getpid)
        world._processes[0].kill()
        with pytest.raises(TaskFailed, match="process died"):
            world.run(os.getpid)
        second, = world.run(os.getpid)
        assert first != second
    finally:
        world.close()
