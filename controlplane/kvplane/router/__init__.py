"""The router: OpenAI-compatible HTTP in front of prefill and decode engines."""
