"""Connections and processes: sockets, request bodies, event streams, keys, and the supervision of gateway processes."""
