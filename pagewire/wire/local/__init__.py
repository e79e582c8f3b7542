"""Streams between neighbours on one machine, without the cost of gRPC for each message.

A server at `unix:/path` also listens at `/path.stream`, where the same handlers serve the same messages of the same
methods with two streams; a channel to such an address uses it by itself. Everything else is gRPC: other methods, other
addresses, clients in other languages, servers that do not listen there. A message costs less than half of what it
costs in gRPC, which wakes more threads of each side for it.

A connection carries one call, in frames: a length (4 bytes, little-endian), a kind (1 byte), and so many bytes. The
first frame of a client is the name of the method.
"""
