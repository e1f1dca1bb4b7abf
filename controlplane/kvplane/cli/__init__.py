"""Commands, configuration and logging: where the parts are put together."""

import os

# gRPC would print raw lines of its own next to the errors that are reported anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its event engine hands each message on from thread to thread. Without it a single call takes an eighth less
# time, an operation over a stream a quarter less (grpcio 1.85, kvplane bench rpc). A gRPC that no longer has
# these switches says so where its verbosity lets it, and goes on.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
