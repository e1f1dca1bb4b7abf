"""The etcd backend: EtcdStore, on a thin client of our own."""

from kvplane.store.etcd.settings import EtcdSettings, EtcdTls
from kvplane.store.etcd.store import EtcdStore

__all__ = ["EtcdSettings", "EtcdStore", "EtcdTls"]
