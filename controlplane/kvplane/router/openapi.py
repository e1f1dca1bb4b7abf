"""The OpenAPI document of the router: routes, parameters, bodies by their essential members, and errors."""

from __future__ import annotations

from typing import Any

from kvplane.router.identity import MAX_ID_BYTES

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_ID: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object", "additionalProperties": True}
_REFUSALS = {
    "400": "What is wrong with the request; `param` names the field or header.",
    "401": "No key, or none that is known.",
    "403": "Not for this caller.",
    "404": "No engine serves the model, or there is no such thing.",
    "405": "Not by this method.",
    "408": "The body did not come within a minute.",
    "413": "The body is larger than the router takes.",
    "415": "The body's Content-Encoding is none that the router unpacks.",
    "417": "An Expect other than 100-continue.",
    "429": "Too much is under way, or a quota is used up; `Retry-After` says when to try again.",
    "500": "A fault of the router's; its log has the request's id.",
    "502": "Engines failed the request.",
    "503": "No engine or no control plane can be reached, or the router is overloaded; `Retry-After` is set.",
    "504": "The request's time is over, or an engine's.",
}
_ENGINES_OWN = "An engine's own answer is passed on with its status."


def _header(description: str, schema: Schema = _TEXT) -> Schema:
    return {"description": description, "schema": schema}


_REQUEST_ID = {"x-request-id": _header("The request's id: the client's, or a new one.")}
_RETRY_AFTER = {"Retry-After": _header("Whole seconds.", _COUNT)}
_TOLD = {
    **_REQUEST_ID,
    "x-kvplane-path": _header("How it was served.", {"type": "string", "enum": ["cold", "pull", "direct"]}),
    "x-kvplane-reason": _header("Why, in a word; see the README."),
    "x-kvplane-reused-tokens": _header("Tokens whose KV was used again, where known.", _COUNT),
    "x-kvplane-expected-tokens": _header("Tokens whose KV was expected to be used again.", _COUNT),
    "x-kvplane-new-tokens": _header("Tokens that were expected to be computed.", _COUNT),
    "x-kvplane-turn": _header(
        "Which turn of its conversation it was, from 1.", {"type": "integer", "minimum": 1}
    ),
    "x-kvplane-prefill-ms": _header("Milliseconds that the prefill engine took.", {"type": "number"}),
}


def _parameter(name: str, place: str, description: str, schema: Schema = _TEXT) -> Schema:
    return {
        "name": name,
        "in": place,
        "description": description,
        "schema": schema,
        **({"required": True} if place == "path" else {}),
    }


_DEADLINE = _parameter(
    "x-request-timeout", "header", 'Seconds that the request may take in all, or "none".', {"type": "string"}
)
_GENERATION = [
    _DEADLINE,
    _parameter("x-request-id", "header", "1 to 128 printable ASCII characters; anything else is replaced."),
    _parameter(
        "x-kvplane-path",
        "header",
        "Forces a path, where the router lets requests do so.",
        {"type": "string", "enum": ["auto", "cold", "pull", "direct"]},
    ),
    _parameter("X-Conversation-ID", "header", "The conversation, where the body names none.", _ID),
    _parameter("X-Session-ID", "header", "The same.", _ID),
]
_MODEL = _parameter("model", "query", "The conversation's model; needed where several are served.", _ID)
_ADAPTER = _parameter(
    "adapter", "query", "Its LoRA adapter; the base model's conversation if left out.", _TEXT
)
_CONVERSATION = _parameter("conversation_id", "path", "As in the requests of the conversation.", _ID)


def _error(anthropic: bool) -> Schema:
    name = "AnthropicError" if anthropic else "Error"
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _responses(
    good: Schema, *statuses: str, anthropic: bool = False, headers: Schema | None = None
) -> Schema:
    found: Schema = {"200": good}
    for status in statuses:
        refused: Schema = {"description": _REFUSALS[status], "content": _error(anthropic)}
        own = {**(headers or {}), **(_RETRY_AFTER if status in ("429", "503") else {})}
        found[status] = {**refused, **({"headers": own} if own else {})}
    return found


def _with_engines_own(responses: Schema) -> Schema:
    """Return responses among which are whatever an engine may answer, errors in its own words included."""
    anything = {"description": _ENGINES_OWN, "content": {"*/*": {}}}
    either = {
        status: {**response, "content": {**response["content"], "*/*": {}}}
        for status, response in responses.items()
    }
    return {**either, "default": anything}


def _json(description: str, schema: Schema = _OBJECT, **more: Any) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


_ALWAYS = ("400", "401", "404", "408", "413", "415", "417", "429", "500", "502", "503", "504")


def _generation(
    summary: str, required: dict[str, Schema], answer: Schema, *, anthropic: bool = False
) -> Schema:
    own = {
        "model": _ID,
        "stream": {"type": ["boolean", "null"]},
        "conversation_id": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_ID_BYTES},
    }
    body = {**_OBJECT, "properties": {**own, **required}, "required": list(required)}
    good = _json("The reply, whole or as a stream of server-sent events.", answer, headers=_TOLD)
    good["content"]["text/event-stream"] = {"schema": _TEXT}
    return {
        "summary": summary,
        "description": f"vLLM's own fields are passed on. `kv_transfer_params` is dropped. {_ENGINES_OWN}",
        "tags": ["generation"],
        "parameters": _GENERATION,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(good, *_ALWAYS, anthropic=anthropic, headers=_REQUEST_ID),
    }


_MESSAGES_FIELD: Schema = {"type": "array", "minItems": 1, "items": {**_OBJECT, "required": ["role"]}}


def _generations() -> dict[str, Schema]:
    chat: Schema = {**_OBJECT, "required": ["choices"]}
    return {
        "/v1/chat/completions": _generation("Chat Completions", {"messages": _MESSAGES_FIELD}, chat),
        "/v1/completions": _generation(
            "Completions", {"prompt": {"type": ["string", "array"]}}, {**_OBJECT, "required": ["choices"]}
        ),
        "/v1/responses": _generation(
            "Responses", {"input": {"type": ["string", "array"]}}, {**_OBJECT, "required": ["output"]}
        ),
        "/v1/messages": _generation(
            "Anthropic's Messages",
            {"messages": _MESSAGES_FIELD, "max_tokens": {"type": "integer", "minimum": 1}},
            {**_OBJECT, "required": ["content"]},
            anthropic=True,
        ),
    }


def _passed(path: str) -> Schema:
    multipart = path.startswith("/v1/audio/")
    kind = "multipart/form-data" if multipart else "application/json"
    content = {kind: {"schema": {**_OBJECT, "properties": {"model": _ID}}}}
    any_kind = {"description": _ENGINES_OWN, "content": {"*/*": {}}}
    responses = _with_engines_own(_responses(any_kind, *_ALWAYS, anthropic=path.startswith("/v1/messages")))
    return {
        "summary": "Passed to an engine that serves the model",
        "tags": ["passed on"],
        "parameters": [_DEADLINE],
        "requestBody": {"content": content},
        "responses": responses,
    }


def _stored(summary: str) -> Schema:
    one = _parameter("response_id", "path", "As the response has it.", {"type": "string", "minLength": 1})
    any_kind = {"description": _ENGINES_OWN, "content": {"*/*": {}}}
    return {
        "summary": summary,
        "tags": ["passed on"],
        "parameters": [one, _DEADLINE],
        "responses": _with_engines_own(_responses(any_kind, *_ALWAYS)),
    }


def _conversations() -> dict[str, Schema]:
    parameters = [_CONVERSATION, _MODEL, _ADAPTER]
    span = {"type": "number", "minimum": 0.001, "maximum": 86_400}
    ended = {**_OBJECT, "required": ["id", "object", "deleted"]}
    touched = {
        **_OBJECT,
        "required": ["id", "object", "touched", "ttl_s", "remaining_s"],
        "properties": {
            "touched": {
                "type": "boolean",
                "description": "The wish was noted: something is retained, or a turn is under way.",
            },
            "ttl_s": {"type": "number", "description": "The wish: seconds from now."},
            "remaining_s": {
                "oneOf": [{"type": "number"}, {"type": "null"}],
                "description": "Seconds of life on record, before the engine has granted the wish;"
                " null: nothing is retained. A touch never shortens it.",
            },
        },
    }
    body = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"ttl_s": {"oneOf": [span, {"type": "null"}]}},
    }
    return {
        "/v1/conversations/{conversation_id}": {
            "delete": {
                "summary": "A conversation is over: what is kept for it is let go",
                "description": "The answer is the same whether or not there was anything.",
                "tags": ["conversations"],
                "parameters": parameters,
                "responses": _responses(_json("Done.", ended), "400", "401", "404", "417", "503"),
            }
        },
        "/v1/conversations/{conversation_id}/touch": {
            "post": {
                "summary": "Have a conversation kept for a while",
                "tags": ["conversations"],
                "parameters": parameters,
                "requestBody": {"content": {"application/json": {"schema": body}}},
                "responses": _responses(
                    _json("What there is to keep.", touched),
                    *("400", "401", "404", "408", "413", "415", "417", "503"),
                ),
            }
        },
    }


def _operations() -> dict[str, Schema]:
    """Return what operators and their tools read."""
    status = {**_OBJECT, "required": ["status"], "properties": {"status": _TEXT}}
    ready = {**_OBJECT, "required": ["ready", "problems"], "properties": {"ready": {"type": "boolean"}}}
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": _TEXT}}}
    turn = _parameter("request_id", "path", "The x-request-id of the answer.", _ID)
    waits = _json("It serves requests.", ready)
    told: dict[str, tuple[str, Schema, list[Schema], tuple[str, ...]]] = {
        "/health": ("The router lives", _json("It does.", status), [], ()),
        "/metrics": ("Metrics", text, [], ()),
        "/version": ("Versions of an engine and of the router", _json("Both."), [], ()),
        "/openapi.json": ("This document", _json("OpenAPI 3.1."), [], ()),
        "/debug/turns/{request_id}": (
            "What was decided for a request, and why",
            _json("See `kvplane explain`."),
            [turn],
            ("403", "404"),
        ),
        "/v1/models": ("Models of all engines", _json("The list."), [], ("401", "502", "503")),
        "/v1/models/{model}": (
            "One of them",
            _json("As its engine describes it."),
            [_parameter("model", "path", "Its name.", {"type": "string", "minLength": 1})],
            ("401", "404", "502", "503"),
        ),
    }
    paths: dict[str, Schema] = {
        path: {
            "get": {
                "summary": summary,
                "tags": ["operation"],
                "parameters": parameters,
                "responses": _responses(good, *statuses, "417"),
            }
        }
        for path, (summary, good, parameters, statuses) in told.items()
    }
    paths["/ready"] = {
        "get": {
            "summary": "The router has engines to serve with, and is not draining",
            "tags": ["operation"],
            "responses": {"200": waits, "503": {**waits, "description": "It does not; `problems` says why."}},
        }
    }
    return paths


def _errors() -> dict[str, Schema]:
    inner = {
        **_OBJECT,
        "required": ["message", "type"],
        "properties": {
            "message": _TEXT,
            "type": _TEXT,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["integer", "string", "null"]},
        },
    }
    anthropic = {**_OBJECT, "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}}
    return {
        "Error": {**_OBJECT, "required": ["error"], "properties": {"error": inner}},
        "AnthropicError": {
            **_OBJECT,
            "required": ["type", "error"],
            "properties": {"type": {"const": "error"}, "error": anthropic},
        },
    }


def document(version: str, passed: tuple[str, ...]) -> Schema:
    """Return the document of a router of some version, which passes on requests to the paths `passed`."""
    paths: dict[str, Schema] = {path: {"post": operation} for path, operation in _generations().items()}
    paths |= {path: {"post": _passed(path)} for path in passed}
    paths["/v1/responses/{response_id}"] = {"get": _stored("A stored response")}
    paths["/v1/responses/{response_id}/cancel"] = {"post": _stored("Cancel one that runs in the background")}
    paths |= _conversations() | _operations()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvplane router",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "vLLM's API in front of prefill and decode engines. Limits: deploy/LIMITS.md.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": _errors(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
