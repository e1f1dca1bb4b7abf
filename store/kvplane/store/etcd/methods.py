"""etcd's methods, by their paths: the names are etcd's, the messages are ours (see the proto)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvplane.etcd.v1 import etcd_pb2 as pb

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """A method's path, and what goes there and comes back."""

    path: str
    request: type[Q]
    answer: type[A]


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
DELETE_RANGE = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
LEASE_TIME_TO_LIVE = Method(
    "/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse
)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
ALARM = Method("/etcdserverpb.Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
