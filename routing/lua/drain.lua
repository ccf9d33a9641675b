-- Takes a replica out of the rotation or lets it back in. ARGV: name, '1' = drain, '0' = resume, now.
-- Returns 1, or 0 where there is no such replica.
local name, drain, now = ARGV[1], ARGV[2] == '1', ARGV[3]
local key = replica_key(name)
local record = redis.call('HMGET', key, 'stage', 'state')
if not record[1] then return 0 end
if drain then
  redis.call('SADD', prefix .. 'drained', name)
  redis.call('ZREM', ready_key(record[1]), name)
  if record[2] == 'ready' then redis.call('HSET', key, 'state', 'draining') end
else
  redis.call('SREM', prefix .. 'drained', name)
  local expires_at = redis.call('ZSCORE', prefix .. 'replicas', name)
  if record[2] == 'draining' and redis.call('HGET', key, 'stopping') ~= '1' then
    redis.call('HSET', key, 'state', 'ready')
    if expires_at and tonumber(expires_at) > tonumber(now) then
      redis.call('ZADD', ready_key(record[1]), expires_at, name)
    end
  end
end
return 1
