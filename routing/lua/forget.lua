-- Removes a record that has ended. ARGV: id. Returns 1, or 0 where it has not ended or is not there.
local status = redis.call('HGET', key.request(ARGV[1]), field.status)
if not status or status == 'queued' or status == 'running' then return 0 end
forget(ARGV[1])
return 1
