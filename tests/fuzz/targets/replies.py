"""What engines stream, through the router's reader by itself: split anywhere, out of order, huge."""

from __future__ import annotations

import json

from kvplane.router.app import APIS
from kvplane.router.replies import StreamGuard, ToolCallScan, UnreadableEventError, scrubbed
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.talk import PRIVATE, events, holds, reply, stream_values
from tests.fuzz.world import spoiled_json

_LONG = 5 << 20


class Replies(Target):
    """Streams, and whole answers."""

    name = "replies"
    share = 4.0

    async def once(self, chance: Chance) -> str:
        path = chance.pick(tuple(APIS))
        if chance.odds(0.1):
            return self._whole(path, chance)
        stream = b"".join(events(path, chance))
        if chance.odds(chance.wild):
            stream = chance.spoiled(stream)
        if chance.odds(0.0005):
            stream = stream.replace(b"hi", b"x" * _LONG, 1)
        pieces = chance.pieces(stream)
        self.input = pieces
        guard = StreamGuard(APIS[path], chance.pick((StreamGuard.UNCHANGED, None, 0, 17)))
        scan, passed = ToolCallScan(), b""
        try:
            for piece in pieces:
                scan.see(piece)
                passed += guard.passed(piece)
            passed += guard.rest()
        except UnreadableEventError:
            return "cut off"
        if any(holds(value, PRIVATE) for value in stream_values(passed)):
            raise Wrong("transfer params reach a client")
        if chance.wild == 0 and len(stream) < _LONG and b"[DONE]" in stream and b"[DONE]" not in passed:
            raise Wrong("the end of a stream is lost")
        return "unchanged" if passed == stream else "changed"

    def _whole(self, path: str, chance: Chance) -> str:
        value = spoiled_json(reply(path, chance), chance, PRIVATE)
        raw = json.dumps(value, ensure_ascii=chance.odds(0.5)).encode("utf-8", "replace")
        if chance.odds(chance.wild):
            raw = chance.spoiled(raw)
        self.input = raw
        passed = scrubbed(raw)
        try:
            read = json.loads(passed or b"null")
        except (ValueError, RecursionError):
            return "no JSON"
        if holds(read, PRIVATE):
            raise Wrong("transfer params reach a client")
        return "whole"
