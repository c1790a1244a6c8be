"""Fixtures: worlds of worker processes, shared by all tests of a session."""

from collections.abc import Callable, Iterator

import pytest

from .workers import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """Gives the world of a size; each size is started at its first use."""
    worlds: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in worlds:
            worlds[size] = World(size)
        return worlds[size]

    yield of_size
    for started in worlds.values():
        started.close()
