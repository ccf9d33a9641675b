-- Takes the first webhook delivery that is due. ARGV: now, seconds until it is due again unless settled.
-- Returns {id, event, try, moment of the first try}, or false where none is due.
local now, lease = ARGV[1], ARGV[2]
while true do
  local member = redis.call('ZRANGEBYSCORE', prefix .. 'deliveries', '-inf', now, 'LIMIT', 0, 1)[1]
  if not member then return false end
  local id, event = string.match(member, '^(%S+) (%S+)$')
  local key = request_key(id)
  if redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', prefix .. 'deliveries', member)
  else
    redis.call('ZADD', prefix .. 'deliveries', tonumber(now) + tonumber(lease), member)
    if event ~= 'ended' then return {id, event, '1', now} end
    redis.call('HSETNX', key, 'webhook_since', now)
    return {id, event, tostring(redis.call('HINCRBY', key, 'webhook_tries', 1)),
      redis.call('HGET', key, 'webhook_since')}
  end
end
