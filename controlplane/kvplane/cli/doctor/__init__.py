"""`kvplane doctor`: what keeps KV from being reused, and how to mend it."""
