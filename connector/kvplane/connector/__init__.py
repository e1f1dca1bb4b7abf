"""The vLLM connector: announces what a decode engine retains, verifies what a prefill engine pulls."""
