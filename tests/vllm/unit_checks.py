"""Unit files for engines (deploy/engines) and vLLM's own argument parser; no engine is started."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from types import SimpleNamespace
from typing import Any

import yaml
from vllm import AsyncEngineArgs, envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from deploy.engines.units import HERE, Start, starts
from kvplane.connector import compat
from kvplane.connector.engine import turn_on_bidirectional
from tests.vllm.runner import run

STARTS = tuple(starts())
PARSER = make_arg_parser(FlexibleArgumentParser())


def parsed(words: tuple[str, ...]) -> argparse.Namespace:
    """Parse what follows `vllm serve`, as that does. Raises AssertionError for what it does not take."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments: argparse.Namespace = PARSER.parse_args(list(words))
    except SystemExit:
        raise AssertionError(said.getvalue()) from None
    validate_parsed_serve_args(arguments)
    return arguments


def engine_arguments(start: Start) -> Any:
    assert start.words[1] == "serve", start
    arguments = parsed(start.words[2:])
    arguments.model = arguments.model_tag
    return AsyncEngineArgs.from_cli_args(arguments)


def check_every_command_line_is_taken() -> None:
    assert len(STARTS) > 10
    for start in STARTS:
        made = engine_arguments(start)
        told = start.transfer
        assert made.model == start.environment["MODEL"], start
        assert made.enable_prefix_caching is True, start
        assert made.shutdown_timeout == int(start.option("--shutdown-timeout") or 0)
        transfer = made.kv_transfer_config
        assert (transfer.kv_role, transfer.engine_id) == (told["kv_role"], told["engine_id"])
        assert transfer.kv_load_failure_policy == "recompute"
        assert transfer.kv_connector_extra_config == told["kv_connector_extra_config"]


def check_options_are_written_out() -> None:
    """The parser takes beginnings of names, too, which the next version may not."""
    for start in STARTS:
        for word in start.words:
            assert not word.startswith("--") or word in PARSER._option_string_actions, (str(start), word)


def check_sizes_are_what_the_layout_says() -> None:
    sizes = {
        start.layout: (made.tensor_parallel_size, made.data_parallel_size, made.nnodes)
        for start in STARTS
        for made in [engine_arguments(start)]
    }
    assert sizes["dp8"] == (1, 8, 1)
    assert sizes["multi-node-tp"] == (16, 1, 2)
    assert sizes["2p3d"] == (4, 1, 1)


def check_the_connector_refuses_none() -> None:
    for start in STARTS:
        made = engine_arguments(start)
        turn_on_bidirectional(
            SimpleNamespace(
                kv_transfer_config=made.kv_transfer_config,
                parallel_config=SimpleNamespace(
                    decode_context_parallel_size=made.decode_context_parallel_size
                ),
            )
        )


def check_variables_of_vllm_exist() -> None:
    for start in STARTS:
        for name in start.environment:
            assert not name.startswith("VLLM_") or name in envs.environment_variables, (str(start), name)


def check_engines_in_kubernetes() -> None:
    transfer = next(start.option("--kv-transfer-config") or "" for start in STARTS if start.layout == "1p1d")
    files = sorted((HERE.parent / "helm" / "engines").glob("*.yaml"))
    manifests = {file: yaml.safe_load(file.read_text()) for file in files}
    engines = [file for file, manifest in manifests.items() if manifest["kind"] == "Deployment"]
    assert [file.stem for file in engines] == ["decode", "prefill"]
    for file in engines:
        pod = manifests[file]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["vllm", "serve"]
        words = [word.replace("$(KV_TRANSFER_CONFIG)", transfer) for word in container["args"]]
        made = parsed(tuple(words))
        assert made.kv_transfer_config.kv_connector == "KVPlaneConnector"
        assert made.shutdown_timeout == 600
        assert made.enable_prompt_tokens_details is (file.stem == "decode")
        for word in words[1:]:
            assert word.partition("=")[0] in PARSER._option_string_actions, word
        for variable in container["env"]:
            name = variable["name"]
            assert not name.startswith("VLLM_") or name in envs.environment_variables, name


def check_wrong_lines_are_not_taken() -> None:
    for words in (("m", "--kv-transfer-confg", "{}"), ("m", "--kv-transfer-config", "{")):
        try:
            parsed(words)
        except (AssertionError, ValueError):
            continue
        raise AssertionError(f"{words} was taken")


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
