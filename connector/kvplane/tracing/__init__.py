"""Traces: of which request something is done, across processes, as W3C trace context has it."""
