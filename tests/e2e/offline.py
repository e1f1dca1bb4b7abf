"""One vLLM engine inside a program, with the connector and no control plane. Runs in vLLM's environment.

usage: python -m tests.e2e.offline MODEL EXECUTOR
"""

import os
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVPlaneConnector",
        kv_connector_module_path="kvplane.connector.plugin",
        kv_role="kv_consumer",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"kvplane_address": "127.0.0.1:1"},
    )
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=256,
        block_size=32,
        enforce_eager=True,
        distributed_executor_backend=sys.argv[2],
        kv_transfer_config=transfer,
    )
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": list(range(5, 100))}], params)
    print(f"generated {len(answer.outputs[0].token_ids)} tokens in {os.getpid()}", flush=True)
