"""The control plane: which conversation's KV is where, for how long, and for whom."""
