-- Ends the waiting requests whose time to start is over. ARGV: now. Returns how many there were.
local due = redis.call('ZRANGEBYSCORE', key.deadlines, '-inf', ARGV[1], 'LIMIT', 0, 1000)
for _, id in ipairs(due) do
  redis.call('ZREM', key.deadlines, id)
  if redis.call('HGET', key.request(id), field.status) == 'queued' then expire(id, ARGV[1]) end
end
return #due
