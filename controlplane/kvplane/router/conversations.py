"""What a client may say of a conversation besides its turns: that it is over, or to be kept for a while."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvplane.client.model import ConversationKey, Touched
from kvplane.router import identity, openai
from kvplane.router.admission import OverloadedError
from kvplane.router.bodies import Bodies, BodyError
from kvplane.router.plane import Plane
from kvplane.router.pool import EnginePool
from kvplane.router.settings import RouterSettings
from kvplane.router.tenancy.caller import caller_of

# aiohttp's own pattern leaves out braces.
_ONE = "/v1/conversations/{conversation_id:[^/]+}"
_MOST_S = 86_400
_SHOWN = 64
"""Characters of a member's name in an answer."""
_NO_MODEL = "No decode engine answers yet: name the model, as in ?model=NAME."


class _NoModelError(Exception):
    """No model is named, and no engine has said yet which it serves."""


class Conversations:
    """Serves `DELETE /v1/conversations/{id}` and `POST /v1/conversations/{id}/touch`.

    A conversation is one of the caller's tenant, and of the model named by `?model=`, which may be left out
    where one model is served; of its base model, unless `?adapter=` names another.
    """

    def __init__(
        self, settings: RouterSettings, *, pool: EnginePool, plane: Plane | None, bodies: Bodies
    ) -> None:
        self._settings = settings
        self._bodies = bodies
        self._pool = pool
        self._plane = plane

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_delete(_ONE, self._delete)
        router.add_post(f"{_ONE}/touch", self._touch)

    async def _delete(self, request: web.Request) -> web.Response:
        """End it. The answer is the same whether or not there was anything."""
        try:
            key = self._key(request)
        except _NoModelError:
            return _unavailable(_NO_MODEL)
        except openai.BadRequestError as error:
            return _refused(error)
        if self._plane is not None and not await self._plane.end(key):
            return _unavailable()
        return _answer({"id": key.conversation_id, "object": "conversation.deleted", "deleted": True})

    async def _touch(self, request: web.Request) -> web.Response:
        """Have it kept for `ttl_s` seconds from now, if its engine can; what lives longer stays as it is."""
        try:
            key, ttl_s = self._key(request), self._ttl_s(await self._bodies.read(request))
        except _NoModelError:
            return _unavailable(_NO_MODEL)
        except openai.BadRequestError as error:
            return _refused(error)
        except BodyError as error:
            return _error(str(error), error.status)
        except OverloadedError as error:
            return _unavailable(str(error))
        finally:
            self._bodies.done(request)
        found = Touched(False) if self._plane is None else await self._plane.touch(key, ttl_s)
        if found is None:
            return _unavailable()
        return _answer(
            {
                "id": key.conversation_id,
                "object": "conversation.touched",
                "touched": found.noted,
                "ttl_s": ttl_s,
                "remaining_s": found.remaining_s,
            }
        )

    def _key(self, request: web.Request) -> ConversationKey:
        conversation_id = request.match_info["conversation_id"]
        model = request.query.get("model") or self._pool.only_model()
        adapter = request.query.get("adapter", "")
        if model is None:
            if not any(engine.models for engine in self._pool.decode_engines()):
                raise _NoModelError
            raise openai.BadRequestError("Several models are served: name one, as in ?model=NAME.", "model")
        for name, value in (("conversation_id", conversation_id), ("model", model), ("adapter", adapter)):
            if not identity.usable_id(value) and (value or name != "adapter"):
                most = identity.MAX_ID_BYTES
                raise openai.BadRequestError(f"{name} must have 1 to {most} bytes in UTF-8.", name)
        tenant = identity.tenant_of(caller_of(), self._settings.tenant_id)
        return ConversationKey(tenant, model, conversation_id, adapter)

    def _ttl_s(self, raw: bytes) -> float:
        body = openai.parse_body(raw) if raw.strip() else {}
        if unknown := body.keys() - {"ttl_s"}:
            name = min(unknown)[:_SHOWN]
            raise openai.BadRequestError(f"{name!r} is unknown: the body has one member, ttl_s.", name)
        value: Any = body.get("ttl_s")
        if value is None:
            return self._settings.tool_ttl_s
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0.001 <= value <= _MOST_S:
            raise openai.BadRequestError(
                f"ttl_s must be a number of seconds from 0.001 to {_MOST_S}; the control plane takes less if"
                " its limit is lower.",
                "ttl_s",
            )
        return float(value)


def _answer(body: openai.Body, status: int = 200) -> web.Response:
    return web.Response(body=openai.dump(body), status=status, content_type="application/json")


def _refused(error: openai.BadRequestError) -> web.Response:
    return _error(str(error), 400, param=error.param)


def _unavailable(problem: str = "The control plane does not answer.") -> web.Response:
    return _error(problem, 503)


def _error(message: str, status: int, *, param: str | None = None) -> web.Response:
    body = openai.error_body(message, status, param=param)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
