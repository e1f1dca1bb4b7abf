"""Real vLLM engines as processes, on a machine without a GPU and with as few as two cores.

What makes that work is collected here: one core per engine, one OpenMP thread that sleeps when idle, UCX over
TCP and shared memory, and NIXL's progress thread slowed down (site/sitecustomize.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports

RIG = Path(__file__).parent
ROOT = RIG.parent.parent
SITE = RIG / "site"
SOURCES = [ROOT / name for name in ("protos", "store", "controlplane", "connector")]
MODEL_NAME = "tiny"
ADAPTER_NAME = "tiny-adapter"
BLOCK_TOKENS = 32  # the CPU attention kernel accepts multiples of 32 only


class Role(StrEnum):
    """Which half of a request an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


Connector = Literal["kvplane", "stock"]


def vllm_venv() -> Path:
    """The virtual environment with vLLM: KVPLANE_VLLM_VENV, else `.venv-vllm` in the checkout.

    Raises RigError when vLLM is not installed there.
    """
    venv = Path(os.environ.get("KVPLANE_VLLM_VENV") or ROOT / ".venv-vllm")
    if not (venv / ".stamp-engine").is_file():
        raise RigError(f"no vLLM environment at {venv}: run 'make test' (or 'make vllm'), which installs it")
    return venv


def tiny_model() -> Path:
    """The folder of the small random model that `make vllm` writes; raises RigError when it is missing."""
    return _model("tiny-model")


def small_model() -> Path:
    """The folder of a smaller one, for tests with many turns; raises RigError when it is missing."""
    return _model("small-model")


def _model(name: str) -> Path:
    model = ROOT / ".cache" / name
    if not (model / "kvplane-tiny-model.json").is_file():
        raise RigError(f"no model at {model}: run 'make test' (or 'make vllm'), which writes it")
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to run one engine. Ports default to free ones, chosen when the settings are made."""

    role: Role
    venv: Path
    model: Path
    log_file: Path
    core: int
    """The n-th core that this process may use; wraps around."""
    connector: Connector = "kvplane"
    kvplane_address: str | None = None
    """host:port of the control plane's gRPC; needed with the kvplane connector."""
    http_port: int = field(default_factory=lambda: free_ports(1)[0])
    side_channel_port: int = field(default_factory=lambda: free_ports(1)[0])
    dtype: str = "bfloat16"
    """Must be the same on both engines; float32 where tokens are compared exactly."""
    prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None
    """Size of the KV pool in blocks of BLOCK_TOKENS tokens; None leaves it to `kv_cache_gib`."""
    kv_cache_gib: int = 2
    max_model_len: int = 16384
    engine_id: str | None = None
    """A fixed id survives restarts; None lets vLLM draw a new one at every start."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """More members of kv_connector_extra_config."""
    arguments: Sequence[str] = ()
    """More of vLLM's command line."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the environment."""
    progress_delay_us: int | None = None
    """Pause between two looks of NIXL's progress thread at the network, see site/sitecustomize.py."""
    adapter: Path | None = None
    """Folder of a LoRA adapter, served as ADAPTER_NAME."""

    def kv_transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's --kv-transfer-config for these settings."""
        extra: dict[str, Any] = {"bidirectional_kv_xfer": True}
        config: dict[str, Any] = {"kv_connector": "NixlConnector"}
        if self.connector == "kvplane":
            if self.kvplane_address is None:
                raise RigError("the kvplane connector needs kvplane_address (host:port of the control plane)")
            config = {
                "kv_connector": "KVPlaneConnector",
                "kv_connector_module_path": "kvplane.connector.plugin",
            }
            extra["kvplane_address"] = self.kvplane_address
        if self.engine_id is not None:
            config["engine_id"] = self.engine_id
        return config | {
            "kv_role": "kv_producer" if self.role is Role.PREFILL else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra | dict(self.extra_config),
        }

    def command(self) -> list[str]:
        """The engine's command line. `vllm serve` is no choice: it looks for a distribution named vllm."""
        return [
            str(self.venv / "bin" / "python"),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", MODEL_NAME),
            *("--host", LOCALHOST, "--port", str(self.http_port)),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--block-size", str(BLOCK_TOKENS), "--enforce-eager", "--enable-prompt-tokens-details"),
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
            *(
                ()
                if self.num_gpu_blocks_override is None
                else ("--num-gpu-blocks-override", str(self.num_gpu_blocks_override))
            ),
            *(
                ()
                if self.adapter is None
                else (
                    "--enable-lora",
                    "--max-lora-rank",
                    "8",
                    "--lora-modules",
                    f"{ADAPTER_NAME}={self.adapter}",
                )
            ),
            *("--kv-transfer-config", json.dumps(self.kv_transfer_config())),
            *self.arguments,
        ]

    def environment(self) -> dict[str, str]:
        """Our environment with what the engine needs, without what belongs to our own interpreter."""
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
        }
        if self.progress_delay_us is not None:
            ours["NIXL_PROGRESS_DELAY_US"] = str(self.progress_delay_us)
        return ours | {
            # This checkout, whichever one the environment was set up from.
            "PYTHONPATH": os.pathsep.join(map(str, [SITE, *SOURCES])),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOCALHOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "VLLM_HOST_IP": LOCALHOST,
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "UCX_TLS": "tcp,self,sm",
            **self.variables,
        }


class Engine(RigProcess):
    """One vLLM engine. `with Engine(settings) as engine: engine.wait_ready()`; stops at the end."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.url = f"http://{LOCALHOST}:{settings.http_port}"
        super().__init__(
            f"{settings.role} engine",
            settings.command(),
            environment=settings.environment(),
            log_file=settings.log_file,
            ready_url=f"{self.url}/health",
            core=settings.core,
        )
