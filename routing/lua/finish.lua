-- Records the outcome of a claimed request. ARGV: id, attempt, incarnation, now, status, then further
-- name, value pairs. Returns 1, or 0 where the claim no longer holds: the outcome then counts for
-- nothing and its files are the caller's to remove. Sent again because its answer got lost, the same
-- outcome of the same claim is 1 again: its files are those of the record. One that was told to stop is
-- canceled, however far it came before it heard of that: a cancel holds once it is answered.
local id, attempt, owner, now, status = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local record = redis.call('HMGET', request_key(id), 'status', 'attempt', 'owner', 'replica', 'hidden', 'cancel')
if record[2] ~= attempt or record[3] ~= owner then return 0 end
if record[1] == status then return 1 end
if record[1] ~= 'running' then return 0 end
local too_late = record[6] == '1' and status ~= 'canceled'
if not too_late then redis.call('HSET', request_key(id), unpack(ARGV, 6)) end
local work = tonumber(redis.call('HGET', request_key(id), 'work') or '0')
count_work(record[4], status == 'succeeded' and work or work - work_left(id), now)
if too_late then
  finish(id, 'canceled', now, {})
  return 0
end
finish(id, status, now, {})
if status == 'succeeded' then redis.call('HINCRBY', totals_key(record[4]), 'completed', 1) end
if status == 'failed' then redis.call('HINCRBY', totals_key(record[4]), 'failed', 1) end
if record[5] == '1' then return 0 end
return 1
