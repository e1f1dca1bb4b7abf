"""Fixtures for tests on real vLLM engines. They fail, never skip, when the environment is missing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.rig.engines import Engine, EngineSettings, tiny_model, vllm_venv
from deploy.rig.process import RigError
from deploy.rig.stack import Stack

VLLM_TEST_TIMEOUT = 900  # seconds, starting engines included

StartStack = Callable[..., Stack]
StartEngine = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests on real engines the time these need to start, unless a test says otherwise."""
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(VLLM_TEST_TIMEOUT))


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """The virtual environment with vLLM and kvplane."""
    try:
        return vllm_venv()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small random model."""
    try:
        return tiny_model()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def start_stack(
    vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartStack]:
    """A function that starts `kvplane up`, P and D and returns the Stack when all are ready.

    Its keyword arguments are those of Stack (dtype, prefill_options, decode_options, plane_arguments). What
    it started is stopped at the end of the module; a test that is done earlier calls `stack.stop()`, because
    a machine with two cores has room for one stack.
    """
    with ExitStack() as stops:

        def start(**options: Any) -> Stack:
            stack = Stack(
                venv=vllm_environment, model=model_dir, log_dir=tmp_path_factory.mktemp("stack"), **options
            )
            stack.start()
            stops.callback(stack.stop)
            return stack

        yield start


@pytest.fixture(scope="module")
def stack(start_stack: StartStack) -> Stack:
    """One stack with default settings (bfloat16, P without prefix caching), shared by the module's tests."""
    return start_stack()


@pytest.fixture(scope="module")
def start_engine(
    vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """A function that starts a single engine from keyword arguments of EngineSettings and waits for it."""
    with ExitStack() as stops:

        def start(**settings: Any) -> Engine:
            log_file = tmp_path_factory.mktemp("engine") / "engine.log"
            engine = Engine(
                EngineSettings(
                    **{"venv": vllm_environment, "model": model_dir, "log_file": log_file} | settings
                )
            )
            engine.start()
            stops.callback(engine.stop)
            engine.wait_ready()
            return engine

        yield start
