-- Records a heartbeat. ARGV: name, incarnation, stage, state, now, expires at, then further name, value
-- pairs of the heartbeat. A later incarnation sorts after an earlier one.
-- Returns {state it is in now, requests waiting in its queue, how many of them have no message in Celery's
-- queue, when it was last told to drain ('' = it is not), seconds that what runs may still take, '1' where
-- this process is to end, requests that it could take from the queues of others}, or {'superseded', incarnation}.
local name, incarnation, stage, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now, expires_at = ARGV[5], ARGV[6]
local former, former_stage, restart, drain_at, drain_s = get(key.replica(name),
  field.incarnation, field.stage, field.restart, field.drain_at, field.drain_s)
if former and former > incarnation then return {'superseded', former} end
if former ~= incarnation then
  if former then redis.call('HINCRBY', key.totals(name), field.restarts, 1) end
  if former_stage then redis.call('ZREM', key.ready(former_stage), name) end
  if former_stage ~= stage then redis.call('HDEL', key.totals(name), field.busy_s, field.busy_work) end
  redis.call('HDEL', key.totals(name), field.busy_from)
end
if state == 'ready' then redis.call('HDEL', key.replica(name), field.error) end
local restarts = restart == incarnation
local drains = restarts or redis.call('SISMEMBER', key.drained, name) == 1
if state == 'ready' and drains then state = 'draining' end
redis.call('HSET', key.replica(name), field.name, name, field.incarnation, incarnation, field.stage, stage,
  field.state, state, field.beat_at, now, unpack(ARGV, 7))
redis.call('ZADD', key.replicas, expires_at, name)
if state == 'ready' then
  redis.call('ZADD', key.ready(stage), expires_at, name)
else
  redis.call('ZREM', key.ready(stage), name)
end
local waiting = redis.call('ZCARD', key.waiting(name))
release_held(stage, now)
local elsewhere = waiting == 0 and redis.call('ZCARD', key.spare(stage)) or 0
return {state, tostring(waiting), tostring(math.max(0, waiting - redis.call('LLEN', key.queue(name)))),
  drains and drain_at or '', drain_s or '', restarts and '1' or '', tostring(elsewhere)}
