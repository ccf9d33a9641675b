-- Takes the first webhook delivery that is due. ARGV: now, seconds until it is due again unless settled.
-- Returns {id, event, try, moment of the first try}, or false where none is due.
local now, lease = ARGV[1], ARGV[2]
while true do
  local member = redis.call('ZRANGEBYSCORE', key.deliveries, '-inf', now, 'LIMIT', 0, 1)[1]
  if not member then return false end
  local id, event = string.match(member, '^(%S+) (%S+)$')
  if redis.call('EXISTS', key.request(id)) == 0 then
    redis.call('ZREM', key.deliveries, member)
  else
    redis.call('ZADD', key.deliveries, tonumber(now) + tonumber(lease), member)
    if event ~= 'ended' then return {id, event, '1', now} end
    redis.call('HSETNX', key.request(id), field.webhook_since, now)
    local tries = redis.call('HINCRBY', key.request(id), field.webhook_tries, 1)
    return {id, event, tostring(tries), redis.call('HGET', key.request(id), field.webhook_since)}
  end
end
