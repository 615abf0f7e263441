"""The store in a Redis or Valkey server, shared by any number of machines.

    <ns>:{meta}:record:<tenant>/<name>   versions and aliases of one name (../record.py), sealed
    <ns>:{meta}:names:<tenant>           sorted set "<name>@", all of score 0: in the order of the bytes
    <ns>:{meta}:blob:<digest>            hash: manifest and index, sealed; claim (which upload it is)
    <ns>:{meta}:push:<tenant>/<name>:<upload>
                                         hash: index of the files of a push, sealed; claim
    <ns>:{meta}:users:<digest>           set "<tenant>/<name>": the records that hold the version
    <ns>:{meta}:changes                  a counter, for news
    <ns>:{meta}:pending                  sorted set of claims, by the time at which an upload counts as dead
    <ns>:{meta}:doomed                   set of claims whose chunks are to be removed
    <ns>:{meta}:operation:<id>           this change was made: a repeated one is not made twice
    <ns>:{<digest>:<upload>}:<n>         chunk n of one upload, at most CHUNK_BYTES, never changed

Keys that are used together share a hash tag, so they share a node of a cluster. Metadata change in one Lua
script. A push sends chunks that expire, claims the upload, makes the chunks permanent, looks that they are
there, and publishes. One that dies before its claim leaves chunks that expire, one that dies after it a claim
that falls due; the next push, delete or start of any store removes what is due.

    url -> primary -> metadata -> upload, read -> content -> changes -> store
"""

from adapter_store.redis_store.store import RedisStore

__all__ = ["RedisStore"]
