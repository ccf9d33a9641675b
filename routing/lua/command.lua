-- Records an operator's command. ARGV: name, 'drain' | 'restart' | 'resume', now, seconds that what runs
-- there may still take.
-- Out of the rotation at once; the replica reads the rest in the answer to its next heartbeat. A drain
-- holds until a resume, over restarts too; a restart is meant for one process of the replica.
-- Returns 'done', 'unknown', or, where a restart finds no process to end, the state it is in.
local name, command, now, drain_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local stage, state, incarnation, stopping =
  get(key.replica(name), field.stage, field.state, field.incarnation, field.stopping)
if not stage then return 'unknown' end
local expires_at = redis.call('ZSCORE', key.replicas, name)
local lives = expires_at and tonumber(expires_at) > tonumber(now)

if command == 'resume' then
  redis.call('SREM', key.drained, name)
  redis.call('HDEL', key.replica(name), field.restart, field.drain_at, field.drain_s)
  if state == 'draining' and stopping ~= '1' then
    redis.call('HSET', key.replica(name), field.state, 'ready')
    if lives then redis.call('ZADD', key.ready(stage), expires_at, name) end
  end
  return 'done'
end
if command == 'restart' then
  if not lives then return 'gone' end
  if state ~= 'ready' and state ~= 'draining' then return state end
  redis.call('HSET', key.replica(name), field.restart, incarnation)
else
  redis.call('SADD', key.drained, name)
end
redis.call('HSET', key.replica(name), field.drain_at, now, field.drain_s, drain_s)
redis.call('ZREM', key.ready(stage), name)
if state == 'ready' then redis.call('HSET', key.replica(name), field.state, 'draining') end
return 'done'
