"""`kvplane end`: a conversation is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.cli.connection import Target, ask, asks_plane
from kvplane.cli.errors import StartError
from kvplane.cli.output import Output, OutputOption, print_json, say, shown

if TYPE_CHECKING:
    from kvplane.client.client import ControlPlaneClient
    from kvplane.client.model import ReleaseOutcome

_MEANING = {
    "released": "what was retained is freed",
    "claimed": "a reader holds what was retained; it is freed when the reader is done, or its time is over",
    "nothing": "there was nothing to release",
}


@asks_plane
def end(
    target: Target,
    conversation: Annotated[str, typer.Argument(help="Its id.")],
    tenant: Annotated[str, typer.Option(help="Whose it is.")] = "default",
    model: Annotated[
        str, typer.Option(help="Its served model; needed where engines serve several, or none is live.")
    ] = "",
    adapter: Annotated[str, typer.Option(help="Its LoRA adapter, if it has one.")] = "",
    output: OutputOption = Output.TEXT,
) -> None:
    """End a conversation: what is retained for it is freed at once.

    A turn that is in flight is not retained when it ends. Ending what does not exist, or once more, is no
    error. Says released, claimed or nothing, as the API does; with nothing also, on standard error, if no
    live engine serves --model.
    """
    from kvplane.client.model import ConversationKey

    async def work(client: ControlPlaneClient) -> tuple[str, ReleaseOutcome, str]:
        named = model or await _only_model(client)
        key = ConversationKey(tenant, named, conversation, adapter)
        outcome = await client.end_conversation(key)
        return named, outcome, await _doubt(client, model) if outcome == "nothing" and model else ""

    named, outcome, doubt = ask(target, work)
    if doubt:
        say(doubt)
    if output is Output.JSON:
        said = {"conversation_id": conversation, "tenant_id": tenant, "model": named}
        print_json({**said, "adapter": adapter or None, "outcome": outcome})
        return
    typer.echo(f"{shown(conversation)}: {outcome}: {_MEANING[outcome]}")


async def _served(client: ControlPlaneClient) -> list[str]:
    """Return the models that live engines serve."""
    return sorted({name for engine in await client.list_engines() for name in engine.spec.served_models})


async def _doubt(client: ControlPlaneClient, model: str) -> str:
    """Return what to say of a model that was named and is served by no live engine, "" if it is served.

    The conversation is ended all the same: its engine may be gone, and its model's name be right.
    """
    from kvplane.client.errors import ControlPlaneError

    try:
        names = await _served(client)
    except ControlPlaneError:
        return ""
    if model in names:
        return ""
    served = f"they serve {', '.join(map(shown, names))}" if names else "none says what it serves"
    return f"--model {shown(model)}: no live engine serves it; {served}"


async def _only_model(client: ControlPlaneClient) -> str:
    """Return the model that all live engines serve. Raises StartError if there is not exactly one."""
    names = await _served(client)
    if len(names) == 1:
        return names[0]
    if not names:
        raise StartError("--model is needed: no live engine says what it serves")
    raise StartError(f"--model is needed: engines serve {', '.join(map(shown, names))}")
