-- A replica says that it lives. ARGV: name, incarnation, stage, state, now, expires at, then further
-- name, value pairs of the heartbeat. A later incarnation sorts after an earlier one.
-- Returns {state it is in now, requests waiting in its line, how many of them have no message in its queue,
-- when it was last told to drain ('' = it is not), seconds that what runs may still take, '1' where this
-- process is to end}, or {'superseded', incarnation}.
local name, incarnation, stage, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now, expires_at = ARGV[5], ARGV[6]
local key = replica_key(name)
local known = redis.call('HGET', key, 'incarnation')
if known and known > incarnation then return {'superseded', known} end
if known ~= incarnation then
  if known then redis.call('HINCRBY', totals_key(name), 'restarts', 1) end
  local former_stage = redis.call('HGET', key, 'stage')
  if former_stage then redis.call('ZREM', ready_key(former_stage), name) end
  if former_stage ~= stage then redis.call('HDEL', totals_key(name), 'busy_s', 'busy_work') end
  redis.call('HDEL', totals_key(name), 'busy_from')
end
if state == 'ready' then redis.call('HDEL', key, 'error') end
local wish = redis.call('HMGET', key, 'restart', 'drain_at', 'drain_s')
local restarts = wish[1] == incarnation
local drains = restarts or redis.call('SISMEMBER', prefix .. 'drained', name) == 1
if state == 'ready' and drains then state = 'draining' end
redis.call('HSET', key, 'name', name, 'incarnation', incarnation, 'stage', stage, 'state', state,
  'beat_at', now, unpack(ARGV, 7))
redis.call('ZADD', prefix .. 'replicas', expires_at, name)
if state == 'ready' then
  redis.call('ZADD', ready_key(stage), expires_at, name)
else
  redis.call('ZREM', ready_key(stage), name)
end
local waiting = redis.call('ZCARD', waiting_key(name))
return {state, tostring(waiting), tostring(math.max(0, waiting - redis.call('LLEN', prefix .. name))),
  drains and wish[2] or '', wish[3] or '', restarts and '1' or ''}
