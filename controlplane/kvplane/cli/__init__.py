"""Commands, configuration and logging: where the parts are put together."""

import os

# gRPC would print raw lines of its own next to the errors that are reported anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
