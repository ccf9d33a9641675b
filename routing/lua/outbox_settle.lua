-- Ends a webhook delivery that was taken, or says when it is due again. ARGV: id, event, moment of the next
-- try ('' = none), moment it was delivered ('' = it was not), what went wrong.
local id, event, again, delivered, fault = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local member = id .. ' ' .. event
if again == '' then
  redis.call('ZREM', key.deliveries, member)
else
  redis.call('ZADD', key.deliveries, 'XX', again, member)
end
if event == 'ended' and redis.call('EXISTS', key.request(id)) == 1 then
  redis.call('HSET', key.request(id), field.webhook_delivered_at, delivered, field.webhook_error, fault)
end
return 1
