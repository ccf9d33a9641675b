-- What an operator wants of a replica. ARGV: name, 'drain' | 'restart' | 'resume', now, seconds that what
-- runs there may still take.
-- Out of the rotation at once; the replica reads the rest in the answer to its next heartbeat. A drain
-- holds until a resume, over restarts too; a restart is meant for one process of the replica.
-- Returns 'done', 'unknown', or, where a restart finds no process to end, the state it is in.
local name, wish, now, drain_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = replica_key(name)
local record = redis.call('HMGET', key, 'stage', 'state', 'incarnation', 'stopping')
local stage, state = record[1], record[2]
if not stage then return 'unknown' end
local expires_at = redis.call('ZSCORE', prefix .. 'replicas', name)
local lives = expires_at and tonumber(expires_at) > tonumber(now)

if wish == 'resume' then
  redis.call('SREM', prefix .. 'drained', name)
  redis.call('HDEL', key, 'restart', 'drain_at', 'drain_s')
  if state == 'draining' and record[4] ~= '1' then
    redis.call('HSET', key, 'state', 'ready')
    if lives then redis.call('ZADD', ready_key(stage), expires_at, name) end
  end
  return 'done'
end
if wish == 'restart' then
  if not lives then return 'gone' end
  if state ~= 'ready' and state ~= 'draining' then return state end
  redis.call('HSET', key, 'restart', record[3])
else
  redis.call('SADD', prefix .. 'drained', name)
end
redis.call('HSET', key, 'drain_at', now, 'drain_s', drain_s)
redis.call('ZREM', ready_key(stage), name)
if state == 'ready' then redis.call('HSET', key, 'state', 'draining') end
return 'done'
