"""Benchmarks: what the control plane and its stores cost on this machine, next to bare gRPC and bare etcd."""
