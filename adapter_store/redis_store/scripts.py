"""The Lua scripts that change metadata: each runs whole or not at all, on keys of the tag {meta}.

They are small, so a server that is full runs them, too: a delete is what it needs. It refuses chunks.
"""

# Replaces one record, and what follows from it, once for each operation.
#   KEYS  1 record  2 names  3 changes  4 operation  5 blob  6 users  7 pending  8 lines  9 graves
#         10 changed  11 first_change  12 format  13 the pushed files to publish, if any
#         14 and more: pushed files that go
#   ARGV  1 the record as the caller read it ("": none)   2 the new one ("": remove)
#         3 member of names   4 member of users   5 "add" | "remove" | "keep": the version of blob and users
#         6 claim of the upload to publish ("": the content is stored), or that must be stored to keep it
#         7 manifest   8 index
#         9 seconds for which the operation is remembered   10 most members of changed
#         11 the format   12 claim of the upload of pushed files ("": none)   13 their index
#         14 to 17 how many lines to remove, lines to add, graves to remove, graves to add; then all of these
#         in this order, a grave to add as its score and its member
#   Returns "done" | "stale": the record is another one by now, or these are not the data any more where the
#   uploads were seen whole, which left '0' under the operation | "lost": an upload or content is gone.
COMMIT = """#!lua flags=allow-oom
local operation = redis.call('GET', KEYS[4])
-- Repeated on another connection: a write, since what a connection waits for is what it wrote.
if operation == '1' then
  redis.call('EXPIRE', KEYS[4], ARGV[9])
  return 'done'
end
if (ARGV[7] ~= '' or ARGV[12] ~= '') and not operation then return 'stale' end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 'stale' end
if ARGV[5] == 'add' then
  if ARGV[12] ~= '' and not redis.call('ZSCORE', KEYS[7], ARGV[12]) then return 'lost' end
  if ARGV[6] == '' then
    if redis.call('EXISTS', KEYS[5]) == 0 then return 'lost' end
  else
    if redis.call('ZREM', KEYS[7], ARGV[6]) == 0 then return 'lost' end
    local old = redis.call('HGET', KEYS[5], 'claim')
    if old then redis.call('ZADD', KEYS[7], 0, old) end
    redis.call('HSET', KEYS[5], 'claim', ARGV[6], 'manifest', ARGV[7], 'index', ARGV[8])
  end
  if ARGV[12] ~= '' then
    redis.call('ZREM', KEYS[7], ARGV[12])
    redis.call('HSET', KEYS[13], 'claim', ARGV[12], 'index', ARGV[13])
  end
  redis.call('SADD', KEYS[6], ARGV[4])
elseif ARGV[5] == 'keep' and ARGV[6] ~= '' then
  if redis.call('HGET', KEYS[5], 'claim') ~= ARGV[6] then return 'lost' end
elseif ARGV[5] == 'remove' then
  redis.call('SREM', KEYS[6], ARGV[4])
  if redis.call('SCARD', KEYS[6]) == 0 then
    local old = redis.call('HGET', KEYS[5], 'claim')
    if old then redis.call('ZADD', KEYS[7], 0, old) end
    redis.call('DEL', KEYS[5])
  end
end
for number = 14, #KEYS do
  local old = redis.call('HGET', KEYS[number], 'claim')
  if old then redis.call('ZADD', KEYS[7], 0, old) end
  redis.call('DEL', KEYS[number])
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[3])
else
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('ZADD', KEYS[2], 0, ARGV[3])
end
local at = 18
for _ = 1, ARGV[14] do redis.call('ZREM', KEYS[8], ARGV[at]); at = at + 1 end
for _ = 1, ARGV[15] do redis.call('ZADD', KEYS[8], 0, ARGV[at]); at = at + 1 end
for _ = 1, ARGV[16] do redis.call('ZREM', KEYS[9], ARGV[at]); at = at + 1 end
for _ = 1, ARGV[17] do redis.call('ZADD', KEYS[9], ARGV[at], ARGV[at + 1]); at = at + 2 end
-- A counter that was flushed goes on from the clock: nobody takes it for one that he has seen. And the store
-- says again of which format it is.
if redis.call('EXISTS', KEYS[3]) == 0 then
  local now = redis.call('TIME')
  redis.call('SET', KEYS[3], now[1] .. string.format('%06d', now[2]))
  redis.call('SET', KEYS[11], redis.call('GET', KEYS[3]))
  redis.call('SET', KEYS[12], ARGV[11], 'NX')
end
local changes = redis.call('INCR', KEYS[3])
redis.call('ZADD', KEYS[10], changes, ARGV[4])
redis.call('ZREMRANGEBYRANK', KEYS[10], 0, -1 - ARGV[10])
redis.call('SET', KEYS[4], '1', 'EX', ARGV[9])
return 'done'
"""

# What changed since a number of changes.
#   KEYS  1 changes  2 changed  3 first_change      ARGV  1 the number   2 most members of changed
#   Returns the number now, then "all", or "some" and the members whose records changed.
NEWS = """#!lua flags=no-writes
local number = redis.call('GET', KEYS[1]) or '0'
local since = tonumber(ARGV[1])
if since == tonumber(number) then return {number, 'some'} end
local first = tonumber(redis.call('GET', KEYS[3]) or '0')
if since < first or since > tonumber(number) then return {number, 'all'} end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[2]) then
  local oldest = tonumber(redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2])
  if oldest > since + 1 then return {number, 'all'} end
end
local members = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf')
table.insert(members, 1, 'some')
table.insert(members, 1, number)
return members
"""

# Says that an upload is under way. One that is published stays so, and one whose chunks are being removed
# does: a repetition may arrive late.
#   KEYS  1 pending  2 what has it once it is published  3 doomed
#   ARGV  1 claim   2 seconds until it counts as dead      Returns nothing.
CLAIM = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[2], 'claim') ~= ARGV[1] and redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 0 then
  redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + ARGV[2], ARGV[1])
end
"""

# Takes dead uploads out of reach of COMMIT, so that their chunks can be removed.
#   KEYS  1 pending  2 doomed      ARGV  1 most claims to move      Returns all doomed claims.
DOOM = """#!lua flags=allow-oom
local now = redis.call('TIME')[1]
for _, claim in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])) do
  redis.call('ZREM', KEYS[1], claim)
  redis.call('SADD', KEYS[2], claim)
end
return redis.call('SMEMBERS', KEYS[2])
"""

# Tells what one holder uses, for some time from now on by this server's clock.
#   KEYS  1 leases  2 leased  3 format      ARGV  1 holder   2 seconds   3 its lease   4 the format
#   Returns nothing. Who holds a lease has a store here, whatever became of the key that says so.
HOLD = """#!lua flags=allow-oom
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], string.format('%.6f', now[1] + now[2] / 1000000 + ARGV[2]), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('SET', KEYS[3], ARGV[4], 'NX')
"""

# All leases that count. Removes the others.
#   KEYS  1 leases  2 leased      Returns holder, lease, holder, lease, ...
LEASES = """#!lua flags=allow-oom
local now = redis.call('TIME')
now = string.format('%.6f', now[1] + now[2] / 1000000)
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], holder)
  redis.call('HDEL', KEYS[2], holder)
end
return redis.call('HGETALL', KEYS[2])
"""

# Tells all others something, for some time from now on by this server's clock, and hears what they tell.
#   KEYS  1 tellers  2 told      ARGV  1 holder   2 seconds   3 what it tells ("": nothing any more)
#   Returns holder, text, holder, text, ...
EXCHANGE = """#!lua flags=allow-oom
local now = redis.call('TIME')
now = now[1] + now[2] / 1000000
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.6f', now + ARGV[2]), ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
end
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.6f', now))) do
  redis.call('ZREM', KEYS[1], holder)
  redis.call('HDEL', KEYS[2], holder)
end
return redis.call('HGETALL', KEYS[2])
"""

# What all who ask have in common.
#   KEYS  1 secret      ARGV  1 what it is to be if there is none      Returns it.
SECRET = """#!lua flags=allow-oom
local secret = redis.call('GET', KEYS[1])
if secret and #secret == #ARGV[1] then
    return secret
end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""
