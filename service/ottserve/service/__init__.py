"""The gateway: gRPC in front of the replicas.

The path of a request, a file each: `interceptors` (id, one log line, outcome) → `servicer` → `admission` (refuse before
any work) → `validate` with `tokenizer` (message → `GenerationTask`) → `router` (task → stream of `TextChunk`) →
`encode` (chunk → message). Knows of the replica its `api` alone; never sees a tensor.
"""
