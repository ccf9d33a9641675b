-- Records an operator's command. ARGV: name, 'drain' | 'restart' | 'resume', now, seconds that what runs
-- there may still take.
-- Out of the rotation at once; the replica reads the rest in the answer to its next heartbeat. A drain
-- holds until a resume, over restarts too; a restart is meant for one process of the replica.
-- Returns 'done', 'unknown', or, where a restart finds no process to end, the state it is in.
local name, command, now, drain_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local known = replicas.get(name, 'stage', 'state', 'incarnation', 'stopping')
if not known.stage then return 'unknown' end
local expires_at = redis.call('ZSCORE', key.replicas, name)
local lives = expires_at and tonumber(expires_at) > tonumber(now)

if command == 'resume' then
  redis.call('SREM', key.drained, name)
  replicas.clear(name, 'restart', 'drain_at', 'drain_s')
  if known.state == 'draining' and known.stopping ~= '1' then
    replicas.set(name, 'state', 'ready')
    if lives then redis.call('ZADD', key.ready(known.stage), expires_at, name) end
  end
  return 'done'
end
if command == 'restart' then
  if not lives then return 'gone' end
  if known.state ~= 'ready' and known.state ~= 'draining' then return known.state end
  replicas.set(name, 'restart', known.incarnation)
else
  redis.call('SADD', key.drained, name)
end
replicas.set(name, 'drain_at', now, 'drain_s', drain_s)
redis.call('ZREM', key.ready(known.stage), name)
if known.state == 'ready' then replicas.set(name, 'state', 'draining') end
return 'done'
