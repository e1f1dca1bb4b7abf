"""Fixtures for tests on real vLLM engines. They fail, never skip, when the environment is missing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.rig.engines import small_model, vllm_venv
from deploy.rig.process import RigError
from deploy.rig.stack import Stack
from tests.e2e.parts import Parts
from tests.e2e.running import Running

VLLM_TEST_TIMEOUT = 900  # seconds, starting engines included

StackWith = Callable[..., Stack]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests on one stack together, in whatever order they came, and give them time to start it."""
    stacks = dict[str, int]()

    def place(item: pytest.Item) -> tuple[int, bool]:
        if not item.get_closest_marker("vllm"):
            return (0, False)
        stack = item.get_closest_marker("stack")
        name = stack.args[0] if stack is not None else item.nodeid.partition("::")[0]
        return stacks.setdefault(name, len(stacks) + 1), stack is not None and "last" in stack.kwargs

    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(VLLM_TEST_TIMEOUT))
    items.sort(key=place)


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """The virtual environment with vLLM and kvplane."""
    try:
        return vllm_venv()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small random model, its smallest kind: the tests ask thousands of times."""
    try:
        return small_model()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """What stack runs now."""
    running = Running()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def stack_with(
    running: Running, vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> StackWith:
    """A function that returns a running `kvplane up` with P and D, ready.

    Its keyword arguments are those of Stack (dtype, prefill_options, decode_options, plane_arguments). The
    stack is the one that runs if that has the same, else another, and the one before it is stopped.
    """

    def stack_with(**options: Any) -> Stack:
        def start(stops: ExitStack) -> Stack:
            logs = tmp_path_factory.mktemp("stack")
            stack = Stack(venv=vllm_environment, model=model_dir, log_dir=logs, **options)
            stack.start()
            stops.callback(stack.stop)
            return stack

        return running.get(repr(sorted(options.items())), start)

    return stack_with


@pytest.fixture
def parts(
    running: Running, vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Parts:
    """Control plane, P and D as programs of their own, in float32, shared by all tests that ask for them."""

    def start(stops: ExitStack) -> Parts:
        parts = Parts(vllm_environment, model_dir, tmp_path_factory.mktemp("parts"), stops)
        parts.start()
        return parts

    return running.get("parts", start)
