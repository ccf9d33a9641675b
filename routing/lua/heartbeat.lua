-- Records a heartbeat. ARGV: name, incarnation, stage, state, now, expires at, then further name, value
-- pairs of the heartbeat. A later incarnation sorts after an earlier one.
-- Returns {state it is in now, requests waiting in its queue, how many of them have no message in Celery's
-- queue, when it was last told to drain ('' = it is not), seconds that what runs may still take, '1' where
-- this process is to end}, or {'superseded', incarnation}.
local name, incarnation, stage, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now, expires_at = ARGV[5], ARGV[6]
local known = replicas.get(name, 'incarnation', 'stage')
if known.incarnation and known.incarnation > incarnation then return {'superseded', known.incarnation} end
if known.incarnation ~= incarnation then
  if known.incarnation then totals.add(name, 'restarts', 1) end
  if known.stage then redis.call('ZREM', key.ready(known.stage), name) end
  if known.stage ~= stage then totals.clear(name, 'busy_s', 'busy_work') end
  totals.clear(name, 'busy_from')
end
if state == 'ready' then replicas.clear(name, 'error') end
local command = replicas.get(name, 'restart', 'drain_at', 'drain_s')
local restarts = command.restart == incarnation
local drains = restarts or redis.call('SISMEMBER', key.drained, name) == 1
if state == 'ready' and drains then state = 'draining' end
replicas.set(name, 'name', name, 'incarnation', incarnation, 'stage', stage, 'state', state,
  'beat_at', now, unpack(ARGV, 7))
redis.call('ZADD', key.replicas, expires_at, name)
if state == 'ready' then
  redis.call('ZADD', key.ready(stage), expires_at, name)
else
  redis.call('ZREM', key.ready(stage), name)
end
local waiting = redis.call('ZCARD', key.waiting(name))
return {state, tostring(waiting), tostring(math.max(0, waiting - redis.call('LLEN', key.queue(name)))),
  drains and command.drain_at or '', command.drain_s or '', restarts and '1' or ''}
