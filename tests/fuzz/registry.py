"""All targets by name."""

from __future__ import annotations

from tests.fuzz.core import Target
from tests.fuzz.targets.configs import Configs, Kubernetes
from tests.fuzz.targets.connectors import Answers, Params, TurnsClient
from tests.fuzz.targets.replies import Replies
from tests.fuzz.targets.roles import Roles, WireRoles
from tests.fuzz.targets.router import Clients, HostileEngines
from tests.fuzz.targets.rpcs import Rpcs, RpcStreams
from tests.fuzz.targets.stored import Records, StoredStreams, StoredValues
from tests.fuzz.targets.tenants import Access, TenantClients
from tests.fuzz.targets.wire import Wire

TARGETS: dict[str, type[Target]] = {
    kind.name: kind
    for kind in (
        Rpcs,
        RpcStreams,
        Roles,
        WireRoles,
        Wire,
        Records,
        StoredValues,
        StoredStreams,
        Replies,
        Clients,
        HostileEngines,
        Configs,
        Kubernetes,
        Params,
        Answers,
        TurnsClient,
        Access,
        TenantClients,
    )
}
