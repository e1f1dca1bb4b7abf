"""`kvplane bench retention`: how long KV is kept, replayed on a trace."""
