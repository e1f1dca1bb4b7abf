"""Configuration: precedence, and one clear line for everything that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplane.cli.config import Config, ConfigError, load_config
from tests.cli.people import run


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvplane.toml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, 'port = 1\ngrpc_port = 1\nhost = "h1"\n')
    monkeypatch.setenv("KVPLANE_PORT", "2")
    monkeypatch.setenv("KVPLANE_GRPC_PORT", "2")
    config = load_config({"port": 3, "grpc_port": None}, file)
    assert (config.port, config.grpc_port, config.host, config.tenant) == (3, 2, "h1", "default")


def test_the_same_settings_by_file_flag_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_file = load_config({}, write(tmp_path, 'decode = ["http://a:1", "http://b:2"]\nlocation_ttl = 60\n'))
    by_flag = load_config({"decode": ["http://a:1", "http://b:2"], "location_ttl": 60})
    monkeypatch.setenv("KVPLANE_DECODE", "http://a:1, http://b:2")
    monkeypatch.setenv("KVPLANE_LOCATION_TTL", "60")
    by_environment = load_config({})
    assert by_file.model_dump() == by_flag.model_dump() == by_environment.model_dump()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpc_prot = 1", "grpc_prot is unknown; did you mean grpc_port?"),
        ("port = ", "not TOML"),
        ('location_ttl = "long"', "kvplane.toml: location_ttl = 'long'"),
        ("location_ttl = 5\nmin_remaining = 10", "--min-remaining (10 s) must be below --location-ttl (5 s)"),
        (
            "location_ttl = 20\nclaim_timeout = 30",
            "--claim-timeout (30 s) must be below --location-ttl",
        ),
        ("[serve]\nport = 1", "[serve] is unknown: keys are flat"),
        ("port = 70000", "port = 70000"),
        ('path = "fast"', "path = 'fast'"),
        ("engine_lease = 0.5", "engine_lease = 0.5"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({}, write(tmp_path, text))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--location-ttl", "5m"), "--location-ttl 5m: input should be a valid number"),
        (("serve", "--location-ttl", "-5"), "--location-ttl -5.0: input should be greater than 0"),
        (("engines", "--timeout", "0"), "--timeout 0: input should be greater than or equal to 0.1"),
    ],
)
async def test_a_time_that_cannot_be_is_told_in_a_line_with_its_unit(
    arguments: tuple[str, ...], said: str
) -> None:
    done = await run(*arguments)
    assert done.error.startswith(said)
    assert done.error.endswith("it is in seconds, without a unit, such as 300")


async def test_other_values_that_cannot_be_are_told_in_a_line() -> None:
    said = (await run("serve", "--grpc-port", "x")).error
    assert said.startswith("--grpc-port x: input should be a valid integer")
    assert "seconds" not in said
    assert (await run("engines", "-o", "x")).error == "--output x: 'x' is not one of 'text', 'json'"
    # Here the usage helps.
    for arguments in (("end",), ("serve", "--prot", "1")):
        done = await run(*arguments)
        assert (done.code, done.error, done.told[:6]) == (2, "", "Usage:")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load_config({}, tmp_path / "absent.toml")


def test_a_mistyped_variable_is_refused_and_foreign_ones_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVPLANE_ADDRESS", "plane:50051")
    monkeypatch.setenv("KVPLANE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVPLANE_PORT_50051_TCP_ADDR", "10.0.0.1")
    load_config({})
    monkeypatch.setenv("KVPLANE_PROT", "1")
    with pytest.raises(ConfigError, match="KVPLANE_PROT is unknown; did you mean KVPLANE_PORT"):
        load_config({})


def test_a_kubernetes_service_link_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLANE_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        load_config({})


def test_a_wrong_flag_is_shown_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match="--grpc-port 99999"):
        load_config({"grpc_port": 99999})


@pytest.mark.parametrize("value", ["inf", "1e308", "1e9", "nan"])
def test_no_duration_is_without_an_end(value: str) -> None:
    """Seen: a control plane with --engine-lease 1e300 started, and answered no engine."""
    durations = [name for name, field in Config.model_fields.items() if field.annotation is float]
    assert len(durations) >= 12
    for name in durations:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}"):
            load_config({name: value})
