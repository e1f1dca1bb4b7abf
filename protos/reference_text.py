"""What the API reference says that is in no proto: how calls are made, and examples."""

# ruff: noqa: E501  Markdown has a table's row on one line

INTRODUCTION = """# API reference

The control plane speaks gRPC: the package `kvplane.v1`, three services, and beside them `grpc.health.v1` and server
reflection (v1 and v1alpha). Everything can be done by unary calls; the streams `AttachEngine` and `Turns` do the same
for engines and for busy routers, and `WatchLocations` tells what changes.

This page is made from [the protos](../protos/kvplane/v1) by `protos/reference.py`; `make lint` checks that it is fresh.
What the words mean: [CONCEPTS.md](CONCEPTS.md).
"""

CALLS = """## How to call it

| | |
|---|---|
| address | `--grpc-host` and `--grpc-port` of `kvplane serve` or `up`: `127.0.0.1:50051` unless set otherwise |
| a miss | is an answer with a [MissReason](#missreason), not an error; so is a release of nothing, and an empty list |
| durations | travel, clock readings never: a life is what is left of it when the message is made |
| ids | 1 to 256 bytes of UTF-8 unless a field says otherwise; a [ConversationKey](#conversationkey) is equal only if all four fields are |
| time limits | give each call a deadline; a call with a `wait` takes at most 5 s longer |
| a lost answer | repeat the same call with the same ids: see below |
| sizes | 4 MiB for a message of a stream, about 1.3 MB for one announcement, 64 KiB for a registration; all limits: [LIMITS.md](LIMITS.md) |

**Idempotency.** Every unary call may be repeated, to any replica.

| call | recognised by | repeated, it answers |
|---|---|---|
| [RegisterEngine](#registerengine) | `request_id` and engine | the same epoch while the lease lives; without `request_id` each call begins an incarnation |
| [AnnounceLocation](#announcelocation) | engine, epoch, the engine's `request_id` | the same location |
| [BeginTurn](#beginturn) | `request_id` | the same turn number while that turn is the conversation's latest |
| [ClaimLocation](#claimlocation) | `request_id`, which is the claim's name | the same claim while it lives |
| [ReleaseLocation](#releaselocation), [DrainEngine](#drainengine), [DeregisterEngine](#deregisterengine) | what they name | that there is nothing (more) to do |
| [RenewEngine](#renewengine), [RenewLocations](#renewlocations), [TouchConversation](#touchconversation) | what they name | as the first time; nothing that ended is revived |

**Pages.** `ListEngines` and `ListLocations` take `page_size` (1 to 1000; 0 means 100) and `page_token`. Give the
`next_page_token` of one answer to the next call until it is empty. A token is a position, opaque, and good at every
replica; what is put on record meanwhile may or may not be in later pages. `ListLocations` answers with a `revision`:
watch from the next one to miss nothing.

**Credentials.** Where the control plane has an access file (`--access`), a caller shows a certificate, or a token as
`authorization: Bearer TOKEN`. With grpcurl: `-cacert`, `-cert`, `-key`, and `-H "authorization: Bearer $(cat FILE)"`
in place of `-plaintext`. The examples below are for a control plane on loopback without either. For people there are
[commands](CLI.md), each with its like in grpcurl and `buf curl`.
"""

ERRORS = """A call that fails has a gRPC status, and in its details a `google.rpc.ErrorInfo` with the domain `kvplane`, one
of these reasons, and in its metadata a `request_id` that the control plane's log has too, with the ids it is about.
`INVALID_FIELD` also has a `google.rpc.BadRequest` that names the field; `UNAVAILABLE` and `QUOTA_EXCEEDED` have a
`google.rpc.RetryInfo`. The trailer `kvplane-error-reason` has the reason alone, for [proxies](MESH.md). Programs go by
the reason, never by the text. An operation of a `Turns` stream that fails has
the same as a [TurnsError](#turnserror).

What to do: `ABORTED`: read again and redo; `FAILED_PRECONDITION`: somebody must act; `UNAVAILABLE`: the same call
later, or at another replica; `NOT_FOUND`: register first; `INVALID_ARGUMENT`: the same call will never work."""

ROLES = """Without an access file (`--access`) everyone who can connect may call everything. With one, each caller has
one role, and what this table does not name is refused."""

EXAMPLES = {
    "LocationService": """```bash
grpcurl -plaintext -d '{"tenant_id": "default", "page_size": 20}' \\
  localhost:50051 kvplane.v1.LocationService/ListLocations
grpcurl -plaintext -d '{"key": {"tenant_id": "default", "model": "MODEL", "conversation_id": "ticket-4711"}}' \\
  localhost:50051 kvplane.v1.LocationService/LookupLocation
grpcurl -plaintext -d '{"key": {"tenant_id": "default", "model": "MODEL", "conversation_id": "ticket-4711"},
  "request_id": "turn-1", "wait": "0.05s"}' localhost:50051 kvplane.v1.LocationService/BeginTurn
grpcurl -plaintext -d '{"key": {"tenant_id": "default", "model": "MODEL", "conversation_id": "ticket-4711"},
  "request_id": "claim-1", "owner": "me"}' localhost:50051 kvplane.v1.LocationService/ClaimLocation
grpcurl -plaintext -d '{"finish_claim": {"claim_id": "claim-1", "owner": "me"}}' \\
  localhost:50051 kvplane.v1.LocationService/ReleaseLocation
grpcurl -plaintext -d '{"end_conversation": {"key": {"tenant_id": "default", "model": "MODEL",
  "conversation_id": "ticket-4711"}}}' localhost:50051 kvplane.v1.LocationService/ReleaseLocation
grpcurl -plaintext -d '{"key": {"tenant_id": "default", "model": "MODEL", "conversation_id": "ticket-4711"},
  "ttl": "120s"}' localhost:50051 kvplane.v1.LocationService/TouchConversation
grpcurl -plaintext -d '{"tenant_id": "default"}' localhost:50051 kvplane.v1.LocationService/WatchLocations
grpcurl -plaintext -d '{"operations": [{"id": 1, "lookup": {"key": {"tenant_id": "default", "model": "MODEL",
  "conversation_id": "ticket-4711"}}}]}' localhost:50051 kvplane.v1.LocationService/Turns
```

A claim takes a location away for good, and one that nobody reads is lost when its time is over: look with
`LookupLocation`. To announce a location without an engine, as a test of one's own:

```bash
grpcurl -plaintext -d '{"engine_id": "d1", "engine_epoch": EPOCH, "announcement": {"key": {"tenant_id": "default",
  "model": "MODEL", "conversation_id": "ticket-4711"}, "request_id": "r1", "turn": TURN, "token_count": 64,
  "block_count": 4, "ttl": "60s", "fingerprint": {"chunk_tokens": 64, "chain": "AAAAAAAAAAA="},
  "kv_transfer_params": "eyJyZW1vdGVfZW5naW5lX2lkIjoiZDEiLCJyZW1vdGVfcmVxdWVzdF9pZCI6InIxIiwicmVtb3RlX2hvc3QiOiIxMjcuMC4wLjEiLCJyZW1vdGVfcG9ydCI6NTYwMCwicmVtb3RlX2Jsb2NrX2lkcyI6W1sxLDIsMyw0XV19"}}' \\
  localhost:50051 kvplane.v1.LocationService/AnnounceLocation
```

`EPOCH` is from `RegisterEngine`, `TURN` from `BeginTurn`; bytes are base64 in JSON.""",
    "EngineService": """```bash
grpcurl -plaintext localhost:50051 kvplane.v1.EngineService/ListEngines
grpcurl -plaintext -d '{"include_gone": true, "with_holdings": true}' \\
  localhost:50051 kvplane.v1.EngineService/ListEngines
grpcurl -plaintext -d '{"engine_id": "d1"}' localhost:50051 kvplane.v1.EngineService/DrainEngine
grpcurl -plaintext -d '{"spec": {"engine_id": "d1", "role": "ENGINE_ROLE_DECODE", "profile": {"model": "MODEL",
  "transfer_mode": "pull"}, "total_blocks": 1000}, "request_id": "start-1"}' \\
  localhost:50051 kvplane.v1.EngineService/RegisterEngine
grpcurl -plaintext -d '{"engine_id": "d1", "engine_epoch": EPOCH}' \\
  localhost:50051 kvplane.v1.EngineService/RenewEngine
grpcurl -plaintext -d '{"engine_id": "d1", "engine_epoch": EPOCH}' \\
  localhost:50051 kvplane.v1.EngineService/DeregisterEngine
```

For people: `kvplane engines`, `kvplane drain d1`.""",
    "StatusService": """```bash
grpcurl -plaintext localhost:50051 kvplane.v1.StatusService/GetStatus
grpcurl -plaintext localhost:50051 grpc.health.v1.Health/Check
grpcurl -plaintext localhost:50051 list
grpcurl -plaintext localhost:50051 describe kvplane.v1.GetStatusResponse
```""",
}
